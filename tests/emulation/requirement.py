"""Requirement of tests on real namespaces: this machine permits them."""

import subprocess
import sys

import pytest

LAUNCHER = [sys.executable, "-m", "emulation"]
TWO_RANKS = ["--topology", "flat=2", "--rates", "flat=20"]


def why_not() -> str | None:
    """Return why this machine cannot emulate a cluster; empty if it can."""
    tried = subprocess.run([*LAUNCHER, *TWO_RANKS, "--", "true"], capture_output=True, text=True)
    return tried.stderr.strip() or None


reason = why_not()
needs_namespaces = pytest.mark.skipif(reason is not None, reason=reason or "")
