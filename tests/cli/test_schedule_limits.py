"""Extreme numbers and bad input of `zero-bubble schedule`."""

from __future__ import annotations

import re

import pytest

from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.schedule import StageCosts, with_post_validation
from megatron.zero_bubble.schedule.formats import (
    costs_to_json,
    schedule_to_json,
)

SIZE = ["--pipeline-size", "4", "--num-microbatches", "8"]


@pytest.mark.parametrize(
    "extreme", ["--time-f 1e20", "--time-f 1e-20", "--time-comm 1e20", "--memory-f 1e20 --memory-b=-1e20"]
)
@pytest.mark.parametrize("overlap", ["", "--no-overlap-communication"])
def test_the_largest_and_the_smallest_numbers_give_finite_ones(ok, extreme, overlap):
    names = [word for name in names_but_slow() for word in ("--schedule", name)]
    table = ok("compare", *names, "--pipeline-size", "2", "--num-microbatches", "4", *extreme.split(), *overlap.split())
    assert not re.search("nan|inf", table)


def names_but_slow():
    return [name for name in names() if name != "optimal"]


BAD = {
    "": "the following arguments are required: COMMAND",
    "paint": "invalid choice: 'paint'",
    "simulate --pipeline-size 4 --num-microbatches 8": "one of the arguments --schedule --input is required",
    "simulate --schedule zb-h9 {size}": "schedule 'zb-h9' is unknown: choose one of gpipe, 1f1b,",
    "compare --schedule zb-h9 {size}": "schedule 'zb-h9' is unknown: choose one of gpipe, 1f1b,",
    "memory-curve --schedule zb-h9 {size}": "schedule 'zb-h9' is unknown: choose one of gpipe, 1f1b,",
    "simulate --schedule zb-h1 --pipeline-size 1 --num-microbatches 8": "--pipeline-size: must be at least 2, got 1",
    "simulate --schedule zb-h1 --pipeline-size 4 --num-microbatches 0": "--num-microbatches: must be at least 1, got 0",
    "simulate --schedule zb-h1 --pipeline-size 4": "argument --num-microbatches is required with --schedule",
    "simulate --schedule zb-h1 {size} --time-f 0": "--time-f: must be above 0, got 0",
    "simulate --schedule zb-h1 {size} --time-w -1": "--time-w: must be above 0, got -1",
    "simulate --schedule zb-h1 {size} --time-b nan": "--time-b: expected a finite number, got nan",
    "simulate --schedule zb-h1 {size} --time-f 1e308": "--time-f: expected a number from 1e-20 to 1e+20, got 1e308",
    "simulate --schedule zb-h1 {size} --time-w 1e-320": "--time-w: expected a number from 1e-20 to 1e+20, got 1e-320",
    "simulate --schedule zb-h1 {size} --memory-b -1e308": "--memory-b: expected a number from 1e-20 to",
    "simulate --schedule auto {size} --memory-limit 1e308": "--memory-limit: expected a number from 1e-20 to 1e+20",
    "simulate --schedule zb-h1 {size} --costs {tmp}/huge.json": "time_f must be numbers from 1e-50 to 1e+50, got 1000",
    "simulate --schedule 1f1b --pipeline-size 100000 --num-microbatches 8": "100000 pipeline ranks with 1 model chunks",
    "simulate --schedule 1f1b --pipeline-size 4 --num-microbatches 1000000000": "use at most 333333",
    "simulate --schedule interleaved-zb {size} --num-chunks 1000000000": "--num-chunks: must be at most 64, got 1000",
    "simulate --schedule zb-h1 {size} --post-validation --steps 1000000000": "8000000000 microbatches on 4 stages",
    "draw --schedule zb-h1 {size} --width 1000000000 --output {tmp}/new.svg": "--width: must be at most 16000",
    "simulate --schedule zb-h1 {size} --time-comm -1": "--time-comm: must not be below 0, got -1",
    "simulate --schedule zb-h1 {size} --time-f 1,2": "--time-f: expected 1 number or 4, got 2",
    "simulate --schedule zb-h1 {size} --time-comm 1,2,3,4": "--time-comm: expected 1 number or 3, got 4",
    "simulate --schedule zb-h1 {size} --time-f 1,x": "--time-f: expected a number, got 'x'",
    "memory-curve --schedule zb-h1 {size}": "--schedule zb-h1 does not depend on a memory limit: choose from",
    "generate --schedule zb-h1 {size} --output {tmp}/new.xyz": "stands for no format: use .json, .csv or .txt, or give",
    "simulate --schedule zb-h1 {size} --memory-w -100": "B and W of rank 0 release more memory than F allocates",
    "simulate --schedule zb-h1 {size} --memory-f -1": "the memory of F on a whole rank, must be above zero, got -1",
    "simulate --schedule zb-h1 {size} --time-r -1": "--time-r: must not be below 0, got -1",
    "simulate --schedule zb-h1 {size} --recompute some": "--recompute: invalid choice: 'some'",
    "simulate --schedule zb-h1 {size} --recompute planned": "does not plan recomputation: choose one of zb-1p,",
    "simulate --schedule auto {size} --recompute planned --memory-limit 0.9": "limit of 0.9; 1 is enough for every",
    "simulate --schedule auto {size} --recompute full --memory-r 0": "--memory-r is 0, so nothing can be dropped",
    "simulate --schedule auto {size} --recompute full --costs {tmp}/four.json": "four.json has no memory_r, so nothing",
    "simulate --schedule zb-h1 {size} --memory-limit 3": "--memory-limit: on rank 0 schedule zb-h1 needs 4 of",
    "compare --schedule zb-h1 {size} --memory-limit 3": "limit of 3; 4 is enough for every rank",
    "simulate --schedule zb-h1 {size} --memory-limit 4,4": "memory_limit has 2 entries, but there are 4 ranks",
    "simulate --schedule zb-h1 {size} --num-chunks 2": "schedule zb-h1 has 1 chunks a rank, got 2",
    "simulate --schedule interleaved-1f1b --pipeline-size 4 --num-microbatches 6": "leave a last group of 2",
    "simulate --schedule zb-h1 {size} --costs {tmp}/none.json": "--costs {tmp}/none.json: cannot be read: No such file",
    "simulate --schedule zb-h1 {size} --costs {tmp}/bad.json": "argument --costs {tmp}/bad.json: not JSON",
    "simulate --schedule zb-h1 {size} --costs {tmp}/three.json": "costs of 3 stages, but --pipeline-size 4 needs 4",
    "simulate --schedule zb-h1 {size} --costs {tmp}/three.json --time-f 2": "--time-f: not allowed with --costs",
    "validate --input {tmp}/future.json": "version 2 of the format is unknown",
    "validate --input {tmp}/none.json": "argument --input {tmp}/none.json: cannot be read: No such file",
    "validate --input {tmp}/bad.json": "argument --input {tmp}/bad.json: not JSON",
    "validate --input {tmp}/binary": "can't decode byte",
    "validate --input {tmp}/incomplete.csv": "rank 0 lacks B0",
    "validate --input {tmp}/future.json --recompute full": "--recompute: not allowed with --input",
    "validate --input {tmp}/future.json --pipeline-size 4": "--pipeline-size: not allowed with --input",
    "draw --schedule zb-h1 {size}": "the following arguments are required: --output",
    "draw --schedule zb-h1 {size} --output {tmp}/new.png": "must end in .svg, .html, or .json",
    "draw --schedule zb-h1 {size} --output {tmp}/none/new.svg": "argument --output: {tmp}/none is not a folder",
    "draw --schedule zb-h1 {size} --output {tmp}/folder.svg": "{tmp}/folder.svg is a folder; name a file",
    "simulate --schedule zb-h1 {size} --output {tmp}/none/new": "argument --output: {tmp}/none is not a folder",
    "memory-curve {size} --output {tmp}/folder.svg": "{tmp}/folder.svg is a folder; name a file",
    "memory-curve {size} --output {tmp}/new.png": "{tmp}/new.png is not possible: this command writes text, .svg or",
    "generate --schedule zb-h1 {size} --lower": "--lower: format grid has no sends and receives: use json or pytorch",
    "generate --schedule zb-h1 {size} --lower --output {tmp}/new.csv": "--lower: format csv has no sends and receives",
    "generate --input {tmp}/right.json --time-f 1,2,3": "--time-f: expected 1 number or 2, got 3",
    "validate --input {tmp}/right.json --time-f 1,2,3": "--time-f: expected 1 number or 2, got 3",
    "validate --input {tmp}/right.json --costs {tmp}/none.json": "--costs {tmp}/none.json: cannot be read: No such",
    "simulate --input {tmp}/right.json --vocabulary-parallel 5": "--vocabulary-parallel: has vocabulary shards, but ",
    "simulate --input {tmp}/right.json --lengths 1,2,3": "--lengths: expected 2 numbers, one for each microbatch,",
    "draw --schedule zb-h1 {size} --lengths 1,2 --output {tmp}/new.svg": "--lengths: expected 8 numbers, one for each",
    "simulate --input {tmp}/incomplete.csv": "rank 0 lacks B0",
    "generate --schedule zb-h1 {size} --post-validation --format pytorch": "PyTorch's CSV has no word: write JSON",
    "simulate --schedule zb-h1 {size} --hardware-queues 2": "--hardware-queues: invalid choice: '2' (choose from",
    "simulate --schedule zb-h1 {size} --hardware-queues 1 --no-overlap-communication": "messages on streams overlap",
    "simulate --schedule zb-h1 {size} --steps 2": "--steps 2 needs --post-validation: otherwise an iteration starts",
    "draw --schedule zb-h1 {size} --steps 0 --output {tmp}/new.svg": "--steps: must be at least 1, got 0",
    "draw --schedule zb-h1 {size} --memory-limit 1 --output {tmp}/new.svg": "is enough for every rank",
    "memory-curve {size} --from 2 --to 1": "--to 1 is below --from 2",
    "memory-curve {size} --dial": "--dial needs --time-d",
    "memory-curve {size} --dial --time-d 1 --offload auto": "--offload: not allowed with --dial",
    "memory-curve {size} --host-bandwidth 25": "--host-bandwidth needs --costs FILE",
    "memory-curve {size} --step 0": "--step: must be above 0",
    "simulate --schedule auto {size} --offload auto --memory-limit 2 --costs {tmp}/four.json --host-bandwidth 25": (
        "--host-bandwidth needs memory in bytes, as in a profile"
    ),
    "simulate --input {tmp}/interlocked.json --lengths 1,2": "a schedule with post-validation is not simulated with",
    "memory-curve {size} --step 1e-9": "are too many: choose a larger --step",
    "memory-curve {size} --step 1e-320": "--step: expected a number from 1e-20 to 1e+20",
    "memory-curve {size} --to 0.3 --from 0.2 --output {tmp}/new.svg": "nothing fits under any of these limits",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_gets_one_line_and_nothing_is_written(run, tmp_path, words):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    huge = costs_to_json(StageCosts.uniform(4, time_f=12345)).replace("12345", "1" + "0" * 55)
    (tmp_path / "huge.json").write_text(huge)
    (tmp_path / "three.json").write_text(costs_to_json(StageCosts.uniform(3)))
    (tmp_path / "four.json").write_text(costs_to_json(StageCosts.uniform(4)))
    future = schedule_to_json(generate("1f1b", 2, 2)).replace('"version": 1', '"version": 2')
    (tmp_path / "future.json").write_text(future)
    (tmp_path / "right.json").write_text(schedule_to_json(generate("1f1b", 2, 2)))
    interlocked = with_post_validation(generate("zb-h1", 2, 2), StageCosts.uniform(2))
    (tmp_path / "interlocked.json").write_text(schedule_to_json(interlocked))
    (tmp_path / "incomplete.csv").write_text("0F0\n1F0,1B0\n")
    (tmp_path / "folder.svg").mkdir()
    before = {path: path.is_dir() or path.read_bytes() for path in tmp_path.iterdir()}
    filled = words.format(size=" ".join(SIZE), tmp=tmp_path).split()
    status, output, errors = run(*filled)
    assert (status, output) == (2, "")
    assert errors.startswith("zero-bubble schedule")
    assert errors.count("\n") == 1
    assert BAD[words].format(tmp=tmp_path) in errors
    assert {path: path.is_dir() or path.read_bytes() for path in tmp_path.iterdir()} == before
