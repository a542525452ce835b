"""Everything that knows xDiT: the patch table, flags, platforms and the exchange's sites. Nothing else imports it."""
