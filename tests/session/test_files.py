"""`write_file` replaces regular files and nothing else."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.zero_bubble.session.files import why_unwritable, write_file

FULL = os.makedev(1, 7)
"""The device of /dev/full."""


def make_device(path: Path) -> Path:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, FULL)
        os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"this user, or this file system, may have no devices: {error}")
    return path


def test_a_regular_file_is_replaced_under_its_permissions(tmp_path):
    path = tmp_path / "file"
    write_file(path, "old")
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    before = path.stat().st_ino
    with path.open() as reader:
        write_file(path, "new ü")
        assert reader.read() == "old", "who reads sees one of the two, and no mixture"
    assert (path.read_text(encoding="utf-8"), path.stat().st_ino == before) == ("new ü", False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("breaks", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, breaks, error):
    path = tmp_path / ("n" * 255)
    path.write_text("old")

    def fail(*unused: object) -> None:
        raise error

    monkeypatch.setattr(os, breaks, fail)
    with pytest.raises(type(error)):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]


def test_the_new_text_is_on_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    """The text is synced first, because a power failure could otherwise leave an empty file under the name."""
    calls = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), real_fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), real_replace(*names)))
    write_file(tmp_path / "file", "100")
    assert calls == ["fsync", "replace"]


def test_links_are_followed_and_stay_links(tmp_path):
    (tmp_path / "disk").mkdir()
    target, link, dangling = tmp_path / "disk" / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("old")
    link.symlink_to("disk/target")
    dangling.symlink_to(tmp_path / "disk" / "later")
    for path in (link, dangling):
        write_file(path, "new")
        assert path.is_symlink()
        assert path.read_text() == "new"
    assert sorted(os.listdir(tmp_path / "disk")) == ["later", "target"]
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="symbolic links"):
        write_file(loop, "new")


@pytest.mark.parametrize("linked", [False, True])
def test_a_device_stays_a_device(tmp_path, linked):
    device = path = make_device(tmp_path / "full")
    if linked:
        path = tmp_path / "link"
        path.symlink_to(device)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, "lost")
    assert device.stat().st_rdev == FULL
    assert path.is_symlink() == linked
    assert len(os.listdir(tmp_path)) == 1 + linked


def test_a_fifo_is_written_through(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=write_file, args=(fifo, "words"))
    writer.start()
    assert fifo.read_text() == "words"
    writer.join()
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_an_open_file_of_this_process_is_continued(tmp_path):
    """`/dev/fd/N` names an open file, which must be continued and not overwritten from its beginning."""
    path = tmp_path / "out"
    code = "import sys; from megatron.zero_bubble.session.files import write_file\n"
    code += "for path in sys.argv[1:]: write_file(path, 'b')"
    with path.open("w") as out:
        out.write("a")
        out.flush()
        root = Path(__file__).parents[2]
        files = ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"]
        subprocess.run([sys.executable, "-c", code, *files], stdout=out, check=True, cwd=root)
        out.write("c")
    assert path.read_text() == "abbbc"


def test_an_output_is_checked_before_long_work(tmp_path, monkeypatch):
    file, folder, locked = tmp_path / "file", tmp_path / "folder", tmp_path / "locked"
    file.touch()
    folder.mkdir()
    locked.mkdir()
    (tmp_path / "link").symlink_to(locked / "file")
    os.mkfifo(locked / "fifo")
    access = os.access
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and access(path, mode))
    assert [why_unwritable(path) for path in (file, folder / "new", locked / "fifo", Path("/dev/fd/1"))] == [None] * 4
    assert why_unwritable(folder) == f"{folder} is a folder; name a file"
    assert why_unwritable(file / "new") == f"{file} is not a folder"
    for path in (locked / "new", tmp_path / "link"):
        assert why_unwritable(path) == f"no permission to write to {locked}"
