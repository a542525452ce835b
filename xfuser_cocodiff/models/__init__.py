"""Small models under the real names: enough to run, test and time xDiT without a download or an accelerator."""
