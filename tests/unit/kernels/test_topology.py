"""Shares of a group's ranks: together they are everything, and nothing twice."""

import subprocess
import sys
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_integration.errors import ConfigError
from kernels_integration.topology import Topology

topologies = st.integers(1, 12).flatmap(
    lambda tp: st.builds(
        Topology,
        tp=st.just(tp),
        dcp=st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0]),
        expert_parallel=st.booleans(),
    )
)


@given(topologies)
def test_dcp_groups_are_neighbours_and_cover_the_ranks(topology):
    assert list(chain(*topology.dcp_groups)) == list(range(topology.tp))
    for rank in range(topology.tp):
        group = topology.dcp_groups[topology.dcp_group(rank)]
        assert len(group) == topology.dcp
        assert group[topology.dcp_rank(rank)] == rank


@given(topologies, st.integers(0, 40))
def test_shares_partition_what_they_divide(topology, size):
    ranks = range(topology.tp)
    assert list(chain(*(topology.columns(size, rank) for rank in ranks))) == list(range(size))
    heads = [topology.heads(size, rank) for rank in ranks]
    assert len({len(share) for share in heads}) == 1
    assert list(chain(*heads))[:size] == list(range(size))
    assert sum(map(len, heads)) < size + topology.tp
    experts = [list(topology.experts(size, rank)) for rank in ranks]
    if topology.expert_parallel:
        assert list(chain(*experts)) == list(range(size))
    else:
        assert experts == [list(range(size))] * topology.tp
    assert topology.attended_heads(size) == sum(len(share) for share in heads[: topology.dcp])


def test_what_cannot_be_divided_is_refused_with_what_can():
    for tp in (1, 2, 3, 4):
        Topology(tp=tp).check(num_heads=4)
    Topology(tp=4, dcp=2).check(num_heads=4)
    with pytest.raises(ConfigError, match=r"size 5 is more than .*num_attention_heads 4.*use 4 or less"):
        Topology(tp=5).check(num_heads=4)
    with pytest.raises(
        ConfigError, match=r"decode-context-parallel-size 4 .* tensor-parallel-size 2; use 1 or 2"
    ):
        Topology(tp=2, dcp=4).check(num_heads=4)
    Topology(interleave=4).check_block_size(8)
    with pytest.raises(ConfigError, match=r"interleave-size 3 .* block-size 8; use one of 1, 2, 4, 8"):
        Topology(interleave=3).check_block_size(8)


def test_no_torch_is_needed():
    code = "import sys, kernels_integration.topology; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
