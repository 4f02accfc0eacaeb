"""The kinds of operations, and `KINDS`, the one table of all that follows from a kind.

All code reads from the table which inputs an operation waits for, what it costs, and how it is drawn. So a new kind
needs a row here, a handler in the executor, and a planner that places it; CONTRIBUTING.md shows one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class OpKind(str, Enum):
    """The kind of an operation. The value is the word that is printed; `KINDS` says all else."""

    F = "F"
    """Forward of one microbatch through one stage."""
    B = "B"
    """Backward, gradient of the input only: the previous stage waits for it."""
    W = "W"
    """Backward, gradient of the weights only: no operation waits for it."""
    BW = "BW"
    """Backward, both gradients in one operation, as autograd computes them."""
    PB = "&B"
    """B that runs in a pair: as one with the F, of another microbatch or stage, right before it."""
    PBW = "&BW"
    """BW that runs in a pair, as PB does."""
    R = "R"
    """Recomputation: the forward once more, for a backward whose activations F did not keep."""
    D = "D"
    """Offload, the copy from the device to the host: F's activations are released once they are there. The copy itself
    begins when F ends, and passes on the rank's host link while the rank computes."""
    H = "H"
    """Reload, the copy from the host back to the device: allocates what D has released, for a backward that waits for
    the copy."""
    E = "E"
    """Embedding: looks the tokens up in this rank's vocabulary shard. The first rank reads the microbatch in it."""
    EW = "EW"
    """Weight gradient of the embedding's rows in this rank's vocabulary shard."""
    S = "S"
    """Output layer on this rank's vocabulary shard: softmax over its rows, and their part of the input gradient."""
    L = "L"
    """Loss of one microbatch, from the softmax of all ranks. Only the last rank has it."""
    T = "T"
    """Weight gradient of the output layer's rows in this rank's vocabulary shard: no operation waits for it."""
    SEND_FORWARD = "SEND_FORWARD"
    RECV_FORWARD = "RECV_FORWARD"
    SEND_BACKWARD = "SEND_BACKWARD"
    RECV_BACKWARD = "RECV_BACKWARD"
    TOKENS = "TOKENS"
    """The first rank's tokens go to all ranks."""
    EMBEDDED = "EMBEDDED"
    """The looked-up rows of all ranks are summed on the first rank."""
    HIDDEN = "HIDDEN"
    """The last stage's output and the labels go to all ranks."""
    SOFTMAX = "SOFTMAX"
    """Softmax and loss are combined on all ranks, and the input gradient is summed on the last rank."""
    LOSS_GRAD = "LOSS_GRAD"
    """The gradient of the loss, one number a token, goes to all ranks."""
    EMBEDDED_GRAD = "EMBEDDED_GRAD"
    """The gradient of the first stage's input goes to all ranks."""
    STEP = "STEP"
    """The optimizer's step of this rank, before the state of all gradients is known."""
    VALIDATE = "VALIDATE"
    """The state of all gradients is known: the step of the iteration before is confirmed or amended."""

    __str__ = str.__str__
    # Enum's own is slow, and kinds are hashed for every operation.
    __hash__ = str.__hash__


class Place(Enum):
    """The stage or rank that produces a needed result, relative to the operation's own stage."""

    SAME_STAGE = "same stage"
    STAGE_BEFORE = "stage before"
    STAGE_AFTER = "stage after"
    FIRST_STAGE = "first stage"
    LAST_STAGE = "last stage"
    FIRST_RANK = "first rank"
    """The rank of the first stage."""
    LAST_RANK = "last rank"
    """The rank of the last stage; in a V it is the first rank."""
    ALL_RANKS = "all ranks"
    """On every rank: the results are reduced in the background, and no rank sends or receives."""


class Need(NamedTuple):
    """A result that an operation waits for. Where the model ends and there is no such stage, it waits for nothing."""

    result: OpKind
    place: Place
    num_before: int = 0
    """By how many the result's microbatch (for STEP: iteration) comes before the operation's own."""
    is_optional: bool = False
    """The operation waits only where the schedule has an operation that makes the result."""
    only_at: Place | None = None
    """The first or the last stage, if the operations of other stages do not wait for it."""


class Message(NamedTuple):
    """The message that a communication operation is one end of."""

    is_send: bool
    neighbour: int
    """The stage at the other end, counted from this one: 1 or -1."""
    other_end: OpKind


class Collective(NamedTuple):
    """A collective of all ranks: a broadcast from one rank, or a sum on one rank.

    Every rank has the operation, and all ranks have their collectives in one order.
    """

    maker: OpKind
    makers: Place
    user: OpKind
    users: Place


@dataclass(frozen=True)
class KindFacts:
    """Properties of one kind of operation: a row of `KINDS`."""

    makes: tuple[OpKind, ...] = ()
    """The results that other operations can need, named by the kind that makes this result alone."""
    needs: tuple[Need, ...] = ()
    receives: OpKind | None = None
    """The message that brings its input from another rank."""
    sends: OpKind | None = None
    """The message that carries its result to another rank."""
    message: Message | None = None
    """Set for communication between two stages alone."""
    collective: Collective | None = None
    """Set for communication between all ranks alone."""
    time: tuple[str, ...] = ()
    """The fields of `StageCosts` whose sum is its time; without any it takes none."""
    memory: tuple[str, ...] = ()
    """The fields of `StageCosts` whose sum is its change of memory."""
    frees: tuple[str, ...] = ()
    """The fields of `StageCosts` whose sum is the memory that it releases."""
    link: str = ""
    """The field of `StageCosts` that is the time for which its copy occupies the rank's host link, if it copies."""
    undoes_memory_of: OpKind | None = None
    """The operation of that kind for the same microbatch allocates less by the memory of this operation, where a
    schedule has it."""
    waiting: str = ""
    """The field of `Bubble` that counts the time a rank waits for its inputs."""
    in_order: str = ""
    """The plural of its result, where it must be made once for each microbatch, in microbatch order."""
    pairs_with: OpKind | None = None
    """The kind of the operation right before it, with which it runs as one (see `pairs`)."""
    runs_on: Place = Place.SAME_STAGE
    """Where it runs: in every stage, or once on each rank or on the last one, as an operation of chunk 0."""
    adds_gradient: bool = False
    """Whether it computes gradients. Other operations can run again."""
    runs_ahead: bool = False
    """Whether a rank runs it, where there is time, long before its first forward arrives: its span begins later."""
    is_per_iteration: bool = False
    """It runs once a rank and iteration, and the number in its name is the iteration's."""
    colour: str = ""
    """Its fill in drawings. Okabe and Ito's colours (2008) stay apart for colour-blind eyes."""
    meaning: str = ""
    """Its name in the legend of drawings."""
    pytorch: str = ""
    """Its letters in the CSV of torch.distributed.pipelining; empty where that has no word for it."""


_BACKWARD = KindFacts(
    needs=(
        Need(OpKind.F, Place.SAME_STAGE),
        Need(OpKind.R, Place.SAME_STAGE, is_optional=True),
        Need(OpKind.H, Place.SAME_STAGE, is_optional=True),
        Need(OpKind.B, Place.STAGE_AFTER),
        Need(OpKind.L, Place.LAST_RANK, is_optional=True, only_at=Place.LAST_STAGE),
    ),
    receives=OpKind.RECV_BACKWARD,
    sends=OpKind.SEND_BACKWARD,
    adds_gradient=True,
    waiting="waiting_for_backward",
)
"""Facts common to all operations that compute the gradient of a stage's input."""

KINDS: Mapping[OpKind, KindFacts] = MappingProxyType(
    {
        OpKind.F: KindFacts(
            makes=(OpKind.F,),
            needs=(
                Need(OpKind.F, Place.STAGE_BEFORE),
                Need(OpKind.E, Place.ALL_RANKS, is_optional=True, only_at=Place.FIRST_STAGE),
            ),
            receives=OpKind.RECV_FORWARD,
            sends=OpKind.SEND_FORWARD,
            time=("time_f",),
            memory=("memory_f",),
            waiting="waiting_for_forward",
            in_order="forwards",
            colour="#56b4e9",
            meaning="F forward",
            pytorch="F",
        ),
        OpKind.B: replace(
            _BACKWARD,
            makes=(OpKind.B,),
            time=("time_b",),
            memory=("memory_b",),
            in_order="gradients of inputs",
            colour="#e69f00",
            meaning="B input gradient",
            pytorch="I",
        ),
        OpKind.W: KindFacts(
            makes=(OpKind.W,),
            needs=(Need(OpKind.B, Place.SAME_STAGE),),
            time=("time_w",),
            memory=("memory_w",),
            waiting="waiting_for_backward",
            in_order="gradients of weights",
            adds_gradient=True,
            colour="#009e73",
            meaning="W weight gradient",
            pytorch="W",
        ),
        OpKind.BW: replace(
            _BACKWARD,
            makes=(OpKind.B, OpKind.W),
            time=("time_b", "time_w"),
            memory=("memory_b", "memory_w"),
            colour="#cc79a7",
            meaning="BW both gradients",
            pytorch="B",
        ),
        OpKind.PB: replace(
            _BACKWARD,
            makes=(OpKind.B,),
            time=("time_b",),
            memory=("memory_b",),
            pairs_with=OpKind.F,
            colour="#e69f00",
            meaning="&B in a pair with F",
            pytorch="I",
        ),
        OpKind.PBW: replace(
            _BACKWARD,
            makes=(OpKind.B, OpKind.W),
            time=("time_b", "time_w"),
            memory=("memory_b", "memory_w"),
            pairs_with=OpKind.F,
            colour="#cc79a7",
            meaning="&BW in a pair with F",
            pytorch="B",
        ),
        OpKind.R: KindFacts(
            makes=(OpKind.R,),
            needs=(Need(OpKind.F, Place.SAME_STAGE),),
            time=("time_r",),
            memory=("memory_r",),
            waiting="waiting_for_backward",
            undoes_memory_of=OpKind.F,
            colour="#f0e442",
            meaning="R recomputation",
        ),
        OpKind.D: KindFacts(
            makes=(OpKind.D,),
            needs=(Need(OpKind.F, Place.SAME_STAGE),),
            frees=("memory_d",),
            link="time_d",
            waiting="waiting_for_copy",
            colour="#77ffaa",
            meaning="D copy to the host",
        ),
        OpKind.H: KindFacts(
            makes=(OpKind.H,),
            needs=(Need(OpKind.D, Place.SAME_STAGE),),
            memory=("memory_d",),
            link="time_h",
            waiting="waiting_for_copy",
            colour="#aaddff",
            meaning="H copy from the host",
        ),
        OpKind.E: KindFacts(
            makes=(OpKind.E,),
            needs=(Need(OpKind.E, Place.FIRST_RANK),),
            time=("time_e",),
            waiting="waiting_for_forward",
            in_order="embeddings",
            runs_on=Place.ALL_RANKS,
            runs_ahead=True,
            colour="#cccccc",
            meaning="E embedding",
        ),
        OpKind.EW: KindFacts(
            makes=(OpKind.EW,),
            needs=(Need(OpKind.B, Place.FIRST_STAGE),),
            time=("time_ew",),
            waiting="waiting_for_backward",
            in_order="gradients of the embedding",
            runs_on=Place.ALL_RANKS,
            adds_gradient=True,
            colour="#666666",
            meaning="EW embedding weight gradient",
        ),
        OpKind.S: KindFacts(
            makes=(OpKind.S,),
            needs=(Need(OpKind.F, Place.LAST_STAGE),),
            time=("time_s",),
            memory=("memory_s",),
            waiting="waiting_for_forward",
            in_order="softmaxes",
            runs_on=Place.ALL_RANKS,
            colour="#0072b2",
            meaning="S output layer's softmax",
        ),
        OpKind.L: KindFacts(
            makes=(OpKind.L,),
            needs=(Need(OpKind.S, Place.ALL_RANKS),),
            waiting="waiting_for_backward",
            in_order="losses",
            runs_on=Place.LAST_RANK,
            colour="#aa00dd",
            meaning="L loss",
        ),
        OpKind.T: KindFacts(
            makes=(OpKind.T,),
            needs=(Need(OpKind.S, Place.SAME_STAGE), Need(OpKind.L, Place.LAST_RANK)),
            time=("time_t",),
            memory=("memory_t",),
            waiting="waiting_for_backward",
            in_order="gradients of the output layer",
            runs_on=Place.ALL_RANKS,
            adds_gradient=True,
            colour="#6666ff",
            meaning="T output layer's weight gradient",
        ),
        OpKind.SEND_FORWARD: KindFacts(message=Message(True, 1, OpKind.RECV_FORWARD), pytorch="SEND_F"),
        OpKind.RECV_FORWARD: KindFacts(message=Message(False, -1, OpKind.SEND_FORWARD), pytorch="RECV_F"),
        OpKind.SEND_BACKWARD: KindFacts(message=Message(True, -1, OpKind.RECV_BACKWARD), pytorch="SEND_B"),
        OpKind.RECV_BACKWARD: KindFacts(message=Message(False, 1, OpKind.SEND_BACKWARD), pytorch="RECV_B"),
        OpKind.TOKENS: KindFacts(
            collective=Collective(OpKind.E, Place.FIRST_RANK, OpKind.E, Place.ALL_RANKS),
        ),
        OpKind.EMBEDDED: KindFacts(
            collective=Collective(OpKind.E, Place.ALL_RANKS, OpKind.F, Place.FIRST_STAGE),
        ),
        OpKind.HIDDEN: KindFacts(
            collective=Collective(OpKind.F, Place.LAST_STAGE, OpKind.S, Place.ALL_RANKS),
        ),
        OpKind.SOFTMAX: KindFacts(
            collective=Collective(OpKind.S, Place.ALL_RANKS, OpKind.L, Place.LAST_RANK),
        ),
        OpKind.LOSS_GRAD: KindFacts(
            collective=Collective(OpKind.L, Place.LAST_RANK, OpKind.T, Place.ALL_RANKS),
        ),
        OpKind.EMBEDDED_GRAD: KindFacts(
            collective=Collective(OpKind.B, Place.FIRST_STAGE, OpKind.EW, Place.ALL_RANKS),
        ),
        OpKind.STEP: KindFacts(
            makes=(OpKind.STEP,),
            waiting="waiting_for_backward",
            is_per_iteration=True,
            colour="#000000",
            meaning="STEP optimizer",
        ),
        OpKind.VALIDATE: KindFacts(
            makes=(OpKind.VALIDATE,),
            needs=(Need(OpKind.STEP, Place.ALL_RANKS, num_before=1),),
            waiting="waiting_for_validation",
            runs_ahead=True,
            is_per_iteration=True,
            colour="#d55e00",
            meaning="VALIDATE step confirmed or amended",
        ),
    }
)
"""The single table of the needs, costs and looks of each kind of operation."""

MESSAGES: Mapping[OpKind, Message] = MappingProxyType(
    {kind: facts.message for kind, facts in KINDS.items() if facts.message is not None}
)
SENDS = frozenset(kind for kind, message in MESSAGES.items() if message.is_send)
RECEIVES = frozenset(kind for kind, message in MESSAGES.items() if not message.is_send)
COLLECTIVES: Mapping[OpKind, Collective] = MappingProxyType(
    {kind: facts.collective for kind, facts in KINDS.items() if facts.collective is not None}
)
COMMUNICATION = SENDS | RECEIVES | frozenset(COLLECTIVES)
VOCABULARY = frozenset(kind for kind, facts in KINDS.items() if facts.makes and facts.runs_on is not Place.SAME_STAGE)
"""The computations on vocabulary shards, which `with_vocabulary` adds."""
POST_VALIDATION = frozenset(kind for kind, facts in KINDS.items() if facts.is_per_iteration)
"""The operations that `with_post_validation` adds."""
TIMES: Mapping[str, OpKind] = MappingProxyType(
    {facts.time[0]: kind for kind, facts in KINDS.items() if len(facts.time) == 1 and facts.makes == (kind,)}
)
"""The fields of `StageCosts` that are times of operations, each with the kind that takes this time alone."""
FORWARDS = frozenset(
    kind for kind, facts in KINDS.items() if facts.makes and not facts.is_per_iteration and not facts.adds_gradient
)
"""The computations that add nothing to a gradient, so that they can be run again, such as F and R."""
COPIES = frozenset(kind for kind, facts in KINDS.items() if facts.link)
"""The copies to and from the host, which take no time of the rank itself."""
RESTORING = COPIES | {OpKind.R}
"""The operations that release or restore activations for a backward: a schedule without backwards has none."""
BACKWARDS = frozenset(kind for kind, facts in KINDS.items() if OpKind.B in facts.makes)
"""The operations that produce the gradient of a stage's input."""
