"""The one exception of this project that is about the machine, not about an argument."""


class KernelUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, and trainers know it by this name
    """A Hopper kernel cannot run here: no SM90 device, or something it needs is missing or too old.

    The message is the sentence that `hopper_kernels.unavailable_reason` gives.
    """
