"""The kinds of operations, and `KINDS`, the table of the properties of each kind.

`KINDS` maps every kind of operation to its inputs, costs and colour. A new kind of operation needs a row in
`KINDS`, a handler in the executor, and a planner that places the operations; CONTRIBUTING.md has an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class OpKind(str, Enum):
    """The kind of an operation. The value of a kind is its name; `KINDS` has the properties of every kind."""

    F = "F"
    """Forward of one microbatch through one stage."""
    B = "B"
    """Backward that computes only the gradient of the input; the previous stage needs this gradient."""
    W = "W"
    """Backward that computes only the gradient of the weights; no other operation needs this gradient."""
    BW = "BW"
    """Backward that computes the gradients of input and weights in one operation, as autograd does."""
    PB = "&B"
    """B in a pair: a B that runs as one operation with the preceding F of another microbatch or stage."""
    PBW = "&BW"
    """BW in a pair: a BW that runs as one operation with the preceding F of another microbatch or stage."""
    R = "R"
    """Recomputation: repeats a forward whose activations were dropped, before the backward of the same microbatch."""
    D = "D"
    """Offload: waits for the copy of activations from device to host, and releases the activations on the device. The
    copy to the host starts when F ends, and runs on the host link of the rank while the rank computes."""
    H = "H"
    """Reload: allocates memory for the activations that D has released, and starts their copy from host to device. The
    backward waits for the end of the copy to the device."""
    E = "E"
    """Embedding: looks tokens up in the vocabulary shard of this rank. E of the first rank also reads the
    microbatch."""
    EW = "EW"
    """Weight gradient of the embedding for the vocabulary shard of this rank."""
    S = "S"
    """Output layer for the vocabulary shard of this rank: the shard's part of the softmax and of the input gradient."""
    L = "L"
    """Loss of one microbatch on the last rank, from the softmax of all ranks."""
    T = "T"
    """Weight gradient of the output layer for this rank's vocabulary shard; no other operation needs this gradient."""
    SEND_FORWARD = "SEND_FORWARD"
    RECV_FORWARD = "RECV_FORWARD"
    SEND_BACKWARD = "SEND_BACKWARD"
    RECV_BACKWARD = "RECV_BACKWARD"
    TOKENS = "TOKENS"
    """Broadcast of the tokens from the first rank to all ranks."""
    EMBEDDED = "EMBEDDED"
    """Sum of the embeddings of all ranks; the first rank gets the sum."""
    HIDDEN = "HIDDEN"
    """Broadcast of the output of the last stage, and of the labels, to all ranks."""
    SOFTMAX = "SOFTMAX"
    """Reduction of softmax and loss over all ranks, and sum of the input gradients; the last rank gets the sum."""
    LOSS_GRAD = "LOSS_GRAD"
    """Broadcast of the gradient of the loss, one number per token, to all ranks."""
    EMBEDDED_GRAD = "EMBEDDED_GRAD"
    """Broadcast of the gradient of the first stage's input to all ranks."""
    STEP = "STEP"
    """The optimizer step of this rank, taken before the norm of all gradients is known."""
    VALIDATE = "VALIDATE"
    """Confirms or amends the optimizer step of the previous iteration, once the norm of all gradients is known."""

    __str__ = str.__str__
    # The hash of Enum is slow, and kinds are hashed for every operation.
    __hash__ = str.__hash__


class Place(Enum):
    """The stage or ranks of an operation; some values are relative to the stage of another operation."""

    SAME_STAGE = "same stage"
    STAGE_BEFORE = "stage before"
    STAGE_AFTER = "stage after"
    FIRST_STAGE = "first stage"
    LAST_STAGE = "last stage"
    FIRST_RANK = "first rank"
    """The rank of the first stage."""
    LAST_RANK = "last rank"
    """The rank of the last stage; in a V with two chunks a rank, the first stage is on the same rank."""
    ALL_RANKS = "all ranks"
    """Every rank; collectives, and not messages between two ranks, carry results from or to all ranks."""


class Need(NamedTuple):
    """A result that an operation needs.

    The first stage needs no result of a previous stage, and the last stage needs no result of a next stage.
    """

    result: OpKind
    """The needed result. For example, `OpKind.B` is the gradient of a stage's input, which a B or a BW makes."""
    place: Place
    """The stage or rank that makes the result."""
    num_before: int = 0
    """Operations of microbatch k need the result of microbatch k - `num_before`; for VALIDATE, k is an iteration."""
    is_optional: bool = False
    """Whether the need holds only for microbatches that have an operation of kind `result` at `place`."""
    only_at: Place | None = None
    """The only stage (first or last) whose operations need the result; None if the operations of every stage need the
    result."""


class Message(NamedTuple):
    """One end of a message: a send or a receive."""

    is_send: bool
    """Whether the operation for the message is a send; otherwise the operation is a receive."""
    neighbour: int
    """Index of the peer's stage minus index of the stage that runs the send or receive: 1 or -1."""
    other_end: OpKind
    """Kind of the operation that the peer runs for the message: a receive for a send, a send for a receive."""


class Collective(NamedTuple):
    """A collective of all ranks: a broadcast from one rank, or a reduction (sum) to one rank.

    Every rank runs an operation for the collective, and all ranks run collectives in the same order.
    """

    maker: OpKind
    """Kind of the operations whose results the collective carries."""
    makers: Place
    """Stage or ranks of the operations whose results the collective carries."""
    user: OpKind
    """Kind of the operations that need the result of the collective."""
    users: Place
    """Stage or ranks of the operations that need the result of the collective."""


@dataclass(frozen=True)
class KindFacts:
    """Properties of one kind of operation: a row of `KINDS`."""

    makes: tuple[OpKind, ...] = ()
    """The results of the operation; by default, a computation makes one result of its own kind. BW makes two results:
    the result of a B and the result of a W."""
    needs: tuple[Need, ...] = ()
    """The results that the operation needs at its start."""
    receives: OpKind | None = None
    """Kind of the receive that brings the input of the operation from another rank."""
    sends: OpKind | None = None
    """Kind of the send that carries the result of the operation to another rank."""
    message: Message | None = None
    """The message of a send or receive; None for other kinds of operations."""
    collective: Collective | None = None
    """The collective that operations of the kind run; None for kinds that are not collectives."""
    time: tuple[str, ...] = ()
    """The fields of `StageCosts` whose sum, minus the field in `saves`, is the time of the operation."""
    saves: tuple[str, ...] = ()
    """The field of `StageCosts` with the time that the operation saves because it makes several results at once."""
    memory: tuple[str, ...] = ()
    """The operation changes the memory in use by the sum of these `StageCosts` fields, minus the field in `frees`."""
    frees: tuple[str, ...] = ()
    """The field of `StageCosts` with the memory that the operation releases."""
    link: str = ""
    """The field of `StageCosts` with the time of the copy on the host link; empty for operations without a copy."""
    undoes_memory_of: OpKind | None = None
    """Kind of an earlier operation that allocates less if a microbatch has both operations; F if this kind is R."""
    waiting: str = "waiting_for_backward"
    """The field of `Bubble` that counts the time for which a rank waits for inputs of the operation."""
    in_order: str = ""
    """Plural name of the results that a stage must make once for each microbatch, in microbatch order."""
    pairs_with: OpKind | None = None
    """Kind of the preceding operation if the operation is the backward of a pair (see `pairs`); None otherwise."""
    runs_on: Place = Place.SAME_STAGE
    """Where the operation runs: in every stage, in chunk 0 of every rank, or in chunk 0 of the last rank."""
    adds_gradient: bool = False
    """Whether the operation adds to gradients. An operation that adds to no gradient can be run again."""
    runs_ahead: bool = False
    """Whether the operation may run long before its rank's first forward; `Timeline.spans` leaves out the idle time
    before this forward."""
    is_per_iteration: bool = False
    """Whether a rank runs the operation once per iteration; the operation's `Op.microbatch` is then the iteration's
    index."""
    colour: str = ""
    """Fill colour in drawings, for most kinds from the palette of Okabe and Ito (2008) for colour-blind readers."""
    meaning: str = ""
    """Name of the kind of operation in the legend of drawings."""
    pytorch: str = ""
    """Letters in the CSV of torch.distributed.pipelining; empty if that CSV has no letters for the kind."""


_B = KindFacts(
    makes=(OpKind.B,),
    needs=(
        Need(OpKind.F, Place.SAME_STAGE),
        Need(OpKind.R, Place.SAME_STAGE, is_optional=True),
        Need(OpKind.H, Place.SAME_STAGE, is_optional=True),
        Need(OpKind.B, Place.STAGE_AFTER),
        Need(OpKind.L, Place.LAST_RANK, is_optional=True, only_at=Place.LAST_STAGE),
    ),
    receives=OpKind.RECV_BACKWARD,
    sends=OpKind.SEND_BACKWARD,
    time=("time_b",),
    memory=("memory_b",),
    adds_gradient=True,
    colour="#e69f00",
    pytorch="I",
)
"""Properties that B has both as a separate operation and in a pair."""
_BW = replace(
    _B,
    makes=(OpKind.B, OpKind.W),
    time=("time_b", "time_w"),
    saves=("saved_bw",),
    memory=("memory_b", "memory_w"),
    colour="#cc79a7",
    pytorch="B",
)
"""Properties that BW has both as a separate operation and in a pair."""

_ROWS: dict[OpKind, KindFacts] = {
    OpKind.F: KindFacts(
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
    OpKind.B: replace(_B, in_order="gradients of inputs", meaning="B input gradient"),
    OpKind.W: KindFacts(
        needs=(Need(OpKind.B, Place.SAME_STAGE),),
        time=("time_w",),
        memory=("memory_w",),
        in_order="gradients of weights",
        adds_gradient=True,
        colour="#009e73",
        meaning="W weight gradient",
        pytorch="W",
    ),
    OpKind.BW: replace(_BW, meaning="BW both gradients"),
    OpKind.PB: replace(_B, pairs_with=OpKind.F, meaning="&B in a pair with F"),
    OpKind.PBW: replace(_BW, pairs_with=OpKind.F, meaning="&BW in a pair with F"),
    OpKind.R: KindFacts(
        needs=(Need(OpKind.F, Place.SAME_STAGE),),
        time=("time_r",),
        memory=("memory_r",),
        undoes_memory_of=OpKind.F,
        colour="#f0e442",
        meaning="R recomputation",
    ),
    OpKind.D: KindFacts(
        needs=(Need(OpKind.F, Place.SAME_STAGE),),
        frees=("memory_d",),
        link="time_d",
        waiting="waiting_for_copy",
        colour="#77ffaa",
        meaning="D copy to the host",
    ),
    OpKind.H: KindFacts(
        needs=(Need(OpKind.D, Place.SAME_STAGE),),
        memory=("memory_d",),
        link="time_h",
        waiting="waiting_for_copy",
        colour="#aaddff",
        meaning="H copy from the host",
    ),
    OpKind.E: KindFacts(
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
        needs=(Need(OpKind.B, Place.FIRST_STAGE),),
        time=("time_ew",),
        in_order="gradients of the embedding",
        runs_on=Place.ALL_RANKS,
        adds_gradient=True,
        colour="#666666",
        meaning="EW embedding weight gradient",
    ),
    OpKind.S: KindFacts(
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
        needs=(Need(OpKind.S, Place.ALL_RANKS),),
        in_order="losses",
        runs_on=Place.LAST_RANK,
        colour="#aa00dd",
        meaning="L loss",
    ),
    OpKind.T: KindFacts(
        needs=(Need(OpKind.S, Place.SAME_STAGE), Need(OpKind.L, Place.LAST_RANK)),
        time=("time_t",),
        memory=("memory_t",),
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
    OpKind.TOKENS: KindFacts(collective=Collective(OpKind.E, Place.FIRST_RANK, OpKind.E, Place.ALL_RANKS)),
    OpKind.EMBEDDED: KindFacts(collective=Collective(OpKind.E, Place.ALL_RANKS, OpKind.F, Place.FIRST_STAGE)),
    OpKind.HIDDEN: KindFacts(collective=Collective(OpKind.F, Place.LAST_STAGE, OpKind.S, Place.ALL_RANKS)),
    OpKind.SOFTMAX: KindFacts(collective=Collective(OpKind.S, Place.ALL_RANKS, OpKind.L, Place.LAST_RANK)),
    OpKind.LOSS_GRAD: KindFacts(collective=Collective(OpKind.L, Place.LAST_RANK, OpKind.T, Place.ALL_RANKS)),
    OpKind.EMBEDDED_GRAD: KindFacts(collective=Collective(OpKind.B, Place.FIRST_STAGE, OpKind.EW, Place.ALL_RANKS)),
    OpKind.STEP: KindFacts(
        is_per_iteration=True,
        colour="#000000",
        meaning="STEP optimizer",
    ),
    OpKind.VALIDATE: KindFacts(
        needs=(Need(OpKind.STEP, Place.ALL_RANKS, num_before=1),),
        waiting="waiting_for_validation",
        runs_ahead=True,
        is_per_iteration=True,
        colour="#d55e00",
        meaning="VALIDATE step confirmed or amended",
    ),
}
KINDS: Mapping[OpKind, KindFacts] = MappingProxyType(
    {
        kind: facts if facts.makes or facts.message or facts.collective else replace(facts, makes=(kind,))
        for kind, facts in _ROWS.items()
    }
)
"""Kind of operation -> properties of the kind."""

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
"""The kinds of computations on vocabulary shards."""
POST_VALIDATION = frozenset(kind for kind, facts in KINDS.items() if facts.is_per_iteration)
"""The kinds of operations of post-validation: STEP and VALIDATE."""
TIMES: Mapping[str, OpKind] = MappingProxyType(
    {facts.time[0]: kind for kind, facts in KINDS.items() if len(facts.time) == 1 and facts.makes == (kind,)}
)
"""Field of `StageCosts` -> kind of operation whose time is the value of the field."""
FORWARDS = frozenset(
    kind for kind, facts in KINDS.items() if facts.makes and not facts.is_per_iteration and not facts.adds_gradient
)
"""The kinds of computations, such as F and R, that can be run again because they add to no gradient."""
COPIES = frozenset(kind for kind, facts in KINDS.items() if facts.link)
"""The kinds of copies to and from the host, which occupy the host link and not the rank."""
RESTORING = COPIES | {OpKind.R}
"""The kinds of operations that release activations, or restore activations before the backward."""
BACKWARDS = frozenset(kind for kind, facts in KINDS.items() if OpKind.B in facts.makes)
"""The kinds of operations that compute the gradient of a stage's input."""
PAIRED = frozenset(kind for kind, facts in KINDS.items() if facts.pairs_with is not None)
"""The kinds of backwards that run as one operation with the forward right before them."""
