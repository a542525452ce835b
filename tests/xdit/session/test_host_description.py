"""What tuning results depend on: a machine, or a setting, with another description is tuned by itself."""

import json

import pytest

from xfuser_cocodiff.engine.topology.launcher import CLUSTER_VARIABLE
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import host_description


def test_settings_that_change_times_change_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(
        topology: str = "2x2", kernels: str = "torch", backend: str = "gloo", rate: float = 1.0, synchronous: str = "0"
    ) -> str:
        cluster = {"rates": {"node": rate}, "addresses": ["10.0.0.1"], "interface": "veth0"}
        monkeypatch.setenv(CLUSTER_VARIABLE, json.dumps(cluster))
        monkeypatch.setenv("CCL_OP_SYNC", synchronous)
        return repr(host_description.describe(Topology.parse(topology), kernels, backend))

    others = describe("4"), describe(kernels="triton"), describe(backend="nccl"), describe(rate=2.0)
    others += (describe(synchronous="1"),)  # V is never sent first, and heads are not split
    assert len({describe(), *others}) == 6
    assert "10.0.0.1" not in describe()  # addresses differ between two runs of one cluster
    assert "veth0" not in describe()
