"""The job that `zero-bubble estimate` estimates: its flags, its cluster, and the costs of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.zero_bubble.cli.estimate.arguments import ClusterFlags, EstimateFlags
from megatron.zero_bubble.cli.invocation import names_in, unless_given, value_of
from megatron.zero_bubble.cli.trainings import complete_training
from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.mcore.paired_stage import refuse_unpaired
from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.default_costs import with_host_link
from megatron.zero_bubble.schedule.formats import Profile, profile_from_json
from megatron.zero_bubble.schedule.model_costs import ModelCosts, Partition, UnitCosts, with_states
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.features import check_shards, plans_offload
from megatron.zero_bubble.session.files import read_file, reading
from megatron.zero_bubble.session.job_flags import LAYOUT_SETTINGS, RECOMPUTATION, JobFlags
from megatron.zero_bubble.session.layers import layers_of_layout, partition_of_flags
from megatron.zero_bubble.session.layout_choice import is_layout_open
from megatron.zero_bubble.session.model_states import Parameters, ReplicaCounts, States
from megatron.zero_bubble.session.profiled_costs import fit_units, partition_of_profile
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.model_count import Flops, ModelCount, UnitCount, count_model, flops_of_sequence

_SHORTEST = 1e-3
"""Shortest duration of an operation, in milliseconds."""
_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--mock-data")
_STAND_INS = {"--train-iters": "1000000000", "--lr": "1e9"}
"""Flag that a training run requires but an estimate ignores -> a large value that contradicts no other flag."""


@dataclass(frozen=True)
class EstimatedJob:
    """The training to estimate, and the cluster on which the training would run."""

    args: Arguments
    flags: JobFlags
    cluster: ClusterFlags
    states: States
    count: ModelCount
    flops_of_sequence: float
    """Floating-point operations of F, B and W together for one sequence, counted as --log-throughput does."""
    profile: Profile | None = None
    """Measured costs; if None, costs are computed from numbers of floating-point operations and bytes."""
    is_quick: bool = False

    @classmethod
    def of(cls, flags: EstimateFlags) -> EstimatedJob:
        """Return the job that the flags describe.

        Raises:
            ValueError: the training would refuse its flags, or the training cannot be estimated.
        """
        profile = None
        if flags.profile is not None:
            with reading(f"argument --profile {flags.profile}"):
                profile = profile_from_json(read_file(flags.profile))
        given = _completed(flags.training_flags, profile)
        with ExitStack() as stack:
            stack.callback(substitute_cuda().restore)
            args, settings = complete_training(
                given, flags.world_size, "zero-bubble estimate", has_cuda=True, for_this_machine=False
            )
            if args.pipeline_model_parallel_size < 2:
                raise ValueError("schedules need --pipeline-model-parallel-size of at least 2")
            training = settings.flags
            check_shards(training, args.padded_vocab_size)
            count, of_sequence = count_model(args), flops_of_sequence(args)
        if training.overlap_moe_expert_parallel_comm:
            refuse_unpaired(args)
        if flags.host_bandwidth is not None and not plans_offload(training):
            raise ValueError("argument --host-bandwidth needs --zero-bubble-offload auto among the training's flags")
        is_measured = profile is not None and any(profile.costs.memory_d)
        if plans_offload(training) and flags.host_bandwidth is None and not is_measured:
            raise ValueError("--zero-bubble-offload auto needs --host-bandwidth, or a --profile of a run with it")
        if flags.profile is not None and profile is not None:
            with reading(f"argument --profile {flags.profile}"):
                # The costs of other stages are fitted, unless the kinds of a hybrid model's layers may differ.
                ignored = {*LAYOUT_SETTINGS} - ({"hybrid_layer_pattern"} if not is_layout_open(training) else set())
                model = {name: value for name, value in training.model.items() if name not in ignored}
                profile.check_fits(profile.placement, model, training.recompute)
                partition_of_profile(profile)  # raises an error for a damaged partition now
        return cls(args, training, flags, States.of(args, flags.zero_stage), count, of_sequence, profile)

    @property
    def replicas(self) -> ReplicaCounts:
        return ReplicaCounts.of(self.args)

    @property
    def flops_per_iteration(self) -> float:
        return self.flops_of_sequence * self.flags.global_batch_size

    @property
    def host_rate(self) -> float | None:
        """Bytes per millisecond of the link between device and host; None without `--host-bandwidth`."""
        return None if self.cluster.host_bandwidth is None else self.cluster.host_bandwidth * 1e6

    def with_flags(self, changed: Mapping[str, Any]) -> EstimatedJob:
        """Return the job with other training flags; `changed` maps names of flags to their new values."""
        args = replace(self.args, **changed)
        count = count_model(args) if changed.keys() & {*RECOMPUTATION} else self.count
        return replace(self, args=args, flags=replace(self.flags, **changed), count=count)

    def partition(self, placement: Placement) -> Partition:
        """Return the number of layers of every stage, in model order.

        Raises:
            ValueError: the layers cannot be divided among the stages of `placement`.
        """
        given = self.args.pipeline_model_parallel_layout
        if given is not None and len(layers := layers_of_layout(given, placement.num_ranks)) == placement.num_stages:
            return layers
        return partition_of_flags(replace(self.flags, pipeline_model_parallel_layout=None), placement)

    def parameters(self, placement: Placement) -> list[Parameters]:
        """Return the number of parameters on every pipeline rank, including all model chunks and a vocabulary shard."""
        first, last = placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
        owners = [placement.rank_of(stage) for stage, size in enumerate(self.partition(placement)) for _ in range(size)]
        ranks = [Parameters(0, 0)] * placement.num_ranks
        for rank, unit in zip([first, *owners, last], self.count.units, strict=True):
            ranks[rank] += unit.parameters
        if self.flags.vocabulary_parallel:
            args = self.args
            table = args.padded_vocab_size // args.tensor_model_parallel_size * args.hidden_size
            tables = 2 if args.untie_embeddings_and_output_weights else 1
            for rank in (first, last):
                ranks[rank] += Parameters(-table, 0)
            ranks = [own + Parameters(tables * table // placement.num_ranks, 0) for own in ranks]
        return ranks

    def bytes_of(self, parameters: Parameters) -> float:
        """Return the bytes that one rank needs for `parameters`, for their gradients and for the optimizer's states."""
        return self.states.of_rank(parameters, self.replicas)

    def exchanged_bytes(self, placement: Placement) -> list[float]:
        """Return the bytes that each pipeline rank sends to its data-parallel replicas in an iteration."""
        num_microbatches = self.flags.most_microbatches
        return [
            self.states.sent_by_rank(parameters, self.replicas, num_microbatches)
            for parameters in self.parameters(placement)
        ]

    def flops(self, placement: Placement) -> Flops:
        """Return the FLOPs of F, B, W and R for one microbatch on one tensor-parallel rank, summed over all stages."""
        f, b, w = (sum(unit.flops[kind] for unit in self.count.units) for kind in range(3))
        layers = zip(self.count.layers, self._recomputed(self.partition(placement)), strict=True)
        return Flops(f, b, w, sum((layer.flops.f for layer, is_recomputed in layers if is_recomputed), 0.0))

    @cached_property
    def costs(self) -> ModelCosts:
        """The costs of embedding, layers and output in milliseconds and bytes, from the job's profile if one is given.

        The costs of F and B exclude full recomputation, unless B itself recomputes; R recomputes one layer at a time.
        """
        costs = self._costs_with_r
        return costs.recomputing_in_backward() if self._recomputes_in_backward else costs

    @property
    def _recomputes_in_backward(self) -> bool:
        """Whether Transformer Engine's backward recomputes layers, as with fp8 and fp4, so that no R runs."""
        return self.flags.recompute_granularity == "full" and self.flags.recompute is Recompute.NONE

    @cached_property
    def _costs_with_r(self) -> ModelCosts:
        input_bytes = self.count.input_bytes
        embedding, *layers, output = map(self._unit_costs, self.count.units)
        if self.profile is not None:
            return with_states(fit_units(self.profile), [unit.state for unit in (embedding, *layers, output)])
        layers = [
            replace(layer, time_r=layer.time_f, memory_r=layer.memory_f - input_bytes, num_blocks=1) for layer in layers
        ]
        is_tied = not self.args.untie_embeddings_and_output_weights
        return ModelCosts(embedding, tuple(layers), output, self.cluster.message_ms(input_bytes), ties_output=is_tied)

    def _unit_costs(self, unit: UnitCount) -> UnitCosts:
        f, b, w, _ = (operations / (self.cluster.flops / 1e3) for operations in unit.flops)
        kept, waiting = unit.activations
        exchanged = self._exchange_ms if unit.parameters.expert else 0.0
        return UnitCosts(
            *(f + exchanged, b + exchanged, w, kept, waiting - kept, -waiting),
            state=self.bytes_of(unit.parameters),
            all_to_all_f=exchanged,
            all_to_all_b=exchanged,
        )

    @property
    def _exchange_ms(self) -> float:
        """Milliseconds to send the tokens of a microbatch to a layer's experts on other ranks and back."""
        args, cluster = self.args, self.cluster
        overlaps = self.flags.overlap_moe_expert_parallel_comm
        bandwidth = cluster.expert_bandwidth or (cluster.interconnect_bandwidth if overlaps else None)
        if bandwidth is None or args.expert_model_parallel_size == 1:
            return 0.0
        input_bytes = self.count.input_bytes * args.moe_router_topk
        return 2 * cluster.message_ms(input_bytes * (1 - 1 / args.expert_model_parallel_size), bandwidth)

    def stage_costs(self, placement: Placement) -> StageCosts:
        """Return the costs of every stage in milliseconds and bytes, from the profile if the job has one.

        Raises:
            ValueError: the layers cannot be divided among the stages of `placement`.
        """
        costs = self._counted_costs(placement) if self.profile is None else self._measured_costs(placement)
        if not self.flags.overlap_moe_expert_parallel_comm:  # exchanges are then parts of F and B
            costs = replace(costs, all_to_all_f=(), all_to_all_b=())
        return costs if self.host_rate is None else with_host_link(costs, self.host_rate, self.count.input_bytes)

    def _counted_costs(self, placement: Placement) -> StageCosts:
        partition, model = self.partition(placement), self._costs_with_r
        layers = zip(model.layers, self._recomputed(partition), strict=True)
        # With uniform recomputation several layers together keep one input.
        together = self.flags.layers_of_block
        shared = self.count.input_bytes * (1 - 1 / together)
        model = replace(
            model,
            layers=tuple(
                replace(layer, memory_r=layer.memory_r + shared, num_blocks=layer.num_blocks / together)
                if is_recomputed
                else replace(layer, time_r=0.0, memory_r=0.0, num_blocks=0)
                for layer, is_recomputed in layers
            ),
        )
        if self._recomputes_in_backward:
            model = model.recomputing_in_backward()
        if self.flags.vocabulary_parallel:
            model = model.vocabulary_parallel(placement.num_ranks)
        costs = model.of_stages(partition, placement)
        times = {name: getattr(costs, name) for name in ("time_f", "time_b", "time_w")}
        costs = replace(costs, **{name: tuple(max(_SHORTEST, time) for time in each) for name, each in times.items()})
        return costs.keeping_everything() if self.flags.recompute is Recompute.NONE else costs

    def _measured_costs(self, placement: Placement) -> StageCosts:
        """Return the profile's costs of the stages, or costs that are fitted to it if its stages had other layers."""
        assert self.profile is not None
        profile, partition, shards = self.profile, self.partition(placement), self.flags.vocabulary_parallel
        is_same = (profile.placement, partition_of_profile(profile)) == (placement, partition)
        if is_same and (profile.costs.has_vocabulary or not shards):
            costs = profile.costs if shards else profile.costs.with_whole_vocabulary()
        elif plans_offload(self.flags) and self.host_rate is None:
            raise ScheduleError("the profile has the copy times of another layout: give --host-bandwidth")
        else:
            units = fit_units(profile)
            units = units.vocabulary_parallel(placement.num_ranks) if shards else units
            costs = units.of_stages(partition, placement)
        return costs.keeping_everything() if self.flags.recompute is Recompute.NONE and any(costs.time_r) else costs

    def _recomputed(self, partition: Partition) -> list[bool]:
        """Return for every layer whether the schedule may recompute the layer."""
        kind = Recompute.FULL if self._recomputes_in_backward else self.flags.recompute
        most = 0 if kind is Recompute.NONE else max(partition)
        if kind is Recompute.FULL and self.flags.recompute_method == "block":
            most = self.flags.recompute_num_layers or 0
        return [index < most for size in partition for index in range(size)]


def _completed(flags: Sequence[str], profile: Profile | None) -> list[str]:
    """Return `flags`, completed with the flags that a training run requires and a default for --transformer-impl.

    The default is the profile's value or, without a profile, Megatron-LM's default. If `flags` reset attention masks,
    choose FSDP2 or choose local attention, no default is added: these flags need local layers, which this project's
    trainer uses by default. A profile also gives the default of --attention-backend, which depends on the machine.
    """
    given = names_in(flags)
    missing = [word for name, value in _STAND_INS.items() for word in unless_given(flags, name, value)]
    engine = "transformer_engine" if profile is None else str(profile.model.get("transformer_impl", "local"))
    needs_local = given & {"--reset-attention-mask", "--use-torch-fsdp2"}
    if not needs_local and value_of("--attention-backend", flags) != "local":
        missing += unless_given(flags, "--transformer-impl", engine)
    backend = None if profile is None else profile.model.get("attention_backend")
    if backend is not None and value_of("--transformer-impl", [*flags, *missing]) in (None, engine):
        missing += unless_given(flags, "--attention-backend", str(backend))
    return [*flags, *missing, *([] if given.intersection(_DATA) else ["--mock-data"])]
