"""Where in a transformer attention is called, and how often."""

from xfuser_cocodiff.xdit.layers.root import Root


class Place:
    """A place in a transformer.

    Args:
        name: in the transformer.
        root: the transformer.
    """

    def __init__(self, name: str, root: Root) -> None:
        self.name, self.root = name, root
        self.again = False
        """Whether this is not its first call within a call of the transformer."""
        self._serial = 0

    def meet(self) -> None:
        """It is called."""
        self.again, self._serial = self._serial == self.root.serial, self.root.serial

    @property
    def branch(self) -> int:
        """Which call of the transformer in this step this is: its branch of classifier-free guidance."""
        return self.root.calls - 1
