"""The script's arguments and writers, for everybody."""

_state = {"args": None, "writer": None}


def get_args():
    assert _state["args"] is not None, "args is not initialized"
    return _state["args"]


def set_args(args):
    _state["args"] = args


def get_tensorboard_writer():
    return _state["writer"]


def set_tensorboard_writer(writer):
    _state["writer"] = writer


def get_wandb_writer():
    return None
