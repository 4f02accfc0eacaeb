"""Faults of the weight-gradient store."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="held-tensors-never-forgotten",
        file="runtime/weight_grad_store.py",
        old="""        self.flushed_bytes = self.bytes_since(0)
""",
        new="""        self.flushed_bytes += self.bytes_since(0)
""",
        effect=(
            "The measured memory of deferred weight gradients grows from microbatch to microbatch, so that plans "
            "need too much memory or are refused."
        ),
    ),
    Fault(
        name="input-gradient-not-waited-for",
        file="mcore/linear.py",
        old="""    if handle is not None:
        handle.wait()
    return grad_input, grad_bias
""",
        new="""    return grad_input, grad_bias
""",
        effect=(
            "With tensor parallelism a layer's input gradient may be used before the tensor-parallel ranks have "
            "added it up."
        ),
    ),
    Fault(
        name="gradient-replaced-without-ddp",
        file="mcore/weight_grad.py",
        old="""            weight.grad += total  # in place, as autograd adds, because the gradient may be a view of a buffer
""",
        new="""            weight.grad = total
""",
        effect=(
            "In a model that is not wrapped in DDP, split layers keep the weight gradient of the last microbatch only."
        ),
    ),
    Fault(
        name="complete-sum-kept",
        file="mcore/weight_grad.py",
        old="""        # A complete sum is not kept, because it is as large as the weight.
        self._total = total if self.num_missing else None
""",
        new="""        self._total = total
""",
        effect="Each split layer keeps one weight gradient in memory until its next backward, also between steps.",
    ),
    Fault(
        name="lost-gradients-rarely-refused",
        file="mcore/step_call.py",
        old="""not defers and any(getattr(weight, "skip_backward_post_hook", False) for weight in""",
        new="""not defers and all(getattr(weight, "skip_backward_post_hook", False) for weight in""",
        effect=(
            "A model in DDP without delay_wgrad_compute is no longer refused, and trains without its deferred "
            "weight gradients."
        ),
    ),
    Fault(
        name="fully-sharded-gradient-replaced",
        file="mcore/fully_sharded.py",
        old="""        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.to(self._gradient_dtype)
""",
        new="""        self._sums[parameter] = gradient.to(self._gradient_dtype)
""",
        effect="With parameters sharded by FSDP2 the weight gradients of all microbatches but the last are lost.",
    ),
)
