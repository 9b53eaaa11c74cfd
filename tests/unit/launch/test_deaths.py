"""What is told of a death, from what Ray and the process itself have said."""

import ray.exceptions

from actors.actor_process import Node
from cluster.launch.deaths import cause_of_death
from cluster.launch.members import Member
from cluster.launch.ray_keeper import describe_exit
from cluster.launch.waiting import why_it_never_lived
from kernels_integration.errors import CheckpointError

MEMBER = Member("shard 1", None, Node(node_id="n", ip="10.0.0.2", pid=77))
# Of Ray 2.60. The first one names OOM killers and SIGSEGV as examples, whatever has happened.
UNEXPECTED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: ShardActor\n\tpid: 77\n"
    "\tip: 10.0.0.2\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
    "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common "
    "causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop "
    "--force was called, or (3) the worker crashed unexpectedly due to SIGSEGV or another unexpected error."
)
MEMORY = (
    "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit "
    "detail: Task was killed due to the node running low on memory."
)
NODE = (
    "The actor died because its node has died. Node Id: 1234\n\tthe actor's node was terminated unexpectedly"
)


class Died(ray.exceptions.RayActorError):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text


def cause(text: str) -> str:
    return cause_of_death(Died(text), MEMBER, None)


def test_each_cause_has_its_words() -> None:
    assert cause(UNEXPECTED) == "it was killed by SIGKILL: by hand, or by the kernel for want of memory"
    assert cause(MEMORY) == "Ray's memory monitor killed it: node 10.0.0.2 ran out of memory"
    assert cause(NODE) == "its node 10.0.0.2 died, or cannot be reached"


def test_an_error_of_the_actors_own_is_told_as_it_is() -> None:
    error = ray.exceptions.RayTaskError("run", "Traceback ...", CheckpointError("no such tensor"))
    assert cause_of_death(error, MEMBER, None) == "CheckpointError: no such tensor"


def test_a_member_is_named_with_its_node_and_process() -> None:
    assert str(MEMBER) == "shard 1 on node 10.0.0.2 (process 77)"


def test_a_node_without_a_package_is_told_without_a_traceback() -> None:
    text = (
        "The actor died because of an error raised in its creation task, ray::ShardActor.__init__() (pid=9, "
        "ip=10.0.0.3)\n\tip: 10.0.0.3\nTraceback (most recent call last):\n"
        '  File "/x/actors/shard_actor.py", line 3, in <module>\n'
        "ModuleNotFoundError: No module named 'msgspec'"
    )
    told = why_it_never_lived(Died(text))
    assert told.startswith(
        "node 10.0.0.3 cannot run latentray: ModuleNotFoundError: No module named 'msgspec';"
    )
    assert "doctor" in told
    assert "Traceback" not in told


def test_exit_codes_and_signals() -> None:
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-99) == "was killed by signal 99"
    assert describe_exit(1) == "ended with exit code 1"
