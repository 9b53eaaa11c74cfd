"""Where gateways go."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.launch.gateways import chosen_nodes

NODES = {f"n{number}": f"10.0.0.{number}" for number in range(1, 13)}
IDS = st.sampled_from(sorted(NODES))


@given(st.none() | st.integers(1, 12), IDS, st.sets(IDS), st.lists(IDS, unique=True))
def test_each_node_gets_one_and_there_are_as_many_as_wanted(
    wanted: int | None, here: str, alive: set[str], taken: list[str]
) -> None:
    chosen = chosen_nodes(wanted, here, {node: NODES[node] for node in alive}, taken)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= alive - set(taken)
    have = len(alive & set(taken))
    free = len(alive) - have
    assert len(chosen) == (free if wanted is None else min(free, max(wanted - have, 0)))


def test_this_node_comes_first_then_they_go_by_address() -> None:
    assert chosen_nodes(None, "n10", NODES, [])[:4] == ["n10", "n1", "n2", "n3"]
    assert chosen_nodes(3, "n10", NODES, ["n10", "n1"]) == ["n2"]
    # a dead node's gateway counts no more, and that node gets none
    alive = {node: ip for node, ip in NODES.items() if node != "n1"}
    assert chosen_nodes(3, "n10", alive, ["n10", "n1"]) == ["n2", "n3"]
