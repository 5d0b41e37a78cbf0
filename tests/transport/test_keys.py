import os
import resource
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import UsageError
from paceline.integrations.spark_worker import WorkerTask
from paceline.membership.environment import Invitation
from paceline.transport.keys import create_keys, load_keys, new_keys, own_keys


def test_keys_come_back_from_a_file_of_the_owner_alone(tmp_path):
    path = tmp_path / "key"
    keys = create_keys(path)
    assert load_keys(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="File exists"):
        create_keys(path)


def test_wrong_key_files_are_one_sentence(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(UsageError, match="No such file"):
        load_keys(path)
    create_keys(path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match=r"\(mode 640\): run `chmod 600 "):
        load_keys(path)
    for content in ("", "x", "a b", "é" * 40 + " " + "b" * 40, "a" * 40 + " " + "b" * 40):
        path.write_text(content)
        path.chmod(0o600)
        with pytest.raises(UsageError, match="holds no key pair"):
            load_keys(path)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A runtime folder and one for temporary files."""
    runtime, temporary = tmp_path / "runtime", tmp_path / "temporary"
    runtime.mkdir(mode=0o700)
    temporary.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return runtime, temporary


def own_temporary(temporary):
    return temporary / f"paceline-{os.geteuid()}"


def test_a_users_own_key_is_made_once_and_for_its_owner_alone(folders):
    runtime, temporary = folders
    with ThreadPoolExecutor(8) as pool:  # all at once
        found = {future.result() for future in [pool.submit(own_keys) for _ in range(8)]}
    assert found == {own_keys()}
    assert [path.name for path in runtime.iterdir()] == ["paceline.key"]
    assert (runtime / "paceline.key").stat().st_mode & 0o777 == 0o600
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("wrong", ["missing", "relative", "no such folder", "a file", "a link", "open to others"])
def test_a_runtime_folder_that_is_not_the_users_alone_is_not_used(folders, monkeypatch, wrong):
    runtime, temporary = folders
    match wrong:
        case "missing":
            monkeypatch.delenv("XDG_RUNTIME_DIR")
        case "relative":
            monkeypatch.chdir(runtime.parent)
            monkeypatch.setenv("XDG_RUNTIME_DIR", "runtime")
        case "no such folder":
            runtime.rmdir()
        case "a file":
            runtime.rmdir()
            runtime.touch(0o600)
        case "a link":
            other = runtime.rename(runtime.with_name("elsewhere"))
            runtime.symlink_to(other)
        case "open to others":
            runtime.chmod(0o750)
    assert own_keys() == load_keys(own_temporary(temporary) / "paceline.key")
    assert own_temporary(temporary).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_another_users_runtime_folder_as_after_su_is_not_used(folders):
    runtime, temporary = folders
    os.chown(runtime, 65534, 65534)
    assert own_keys() == load_keys(own_temporary(temporary) / "paceline.key")
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("trap", ["another user's", "a link", "open to others"])
def test_a_temporary_folder_that_another_user_has_made_is_one_sentence(folders, monkeypatch, trap):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    own = own_temporary(folders[1])
    if trap == "a link":
        own.symlink_to(folders[0])
    else:
        own.mkdir(mode=0o700)
        if trap == "open to others":
            own.chmod(0o770)
        elif os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        else:
            os.chown(own, 65534, 65534)
    with pytest.raises(
        UsageError, match=r"Another user owns .*Set XDG_RUNTIME_DIR to .*or give all workers a key file"
    ):
        own_keys()


def test_where_nothing_can_be_written_it_is_one_sentence(folders, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/self")
    with pytest.raises(UsageError, match=r"Cannot make the folder /proc/self/paceline-\d+: .*Set XDG_RUNTIME_DIR"):
        own_keys()


def test_a_key_that_cannot_be_written_leaves_no_file(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # as on a full disk: opened, and not written
    try:
        with pytest.raises(UsageError, match="Cannot write the key file"):
            create_keys(tmp_path / "run.key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_no_secret_is_shown_by_what_holds_the_keys():
    keys = new_keys()
    task = WorkerTask("tcp://127.0.0.1:1", keys, b"", "all-reduce", 2, True, 0, 1.0, 1.0)
    invitation = Invitation(num_workers=2, address="127.0.0.1:1", key=keys)
    for holder in (keys, task, invitation):
        for text in (repr(holder), str(holder), f"{[holder]}", traceback.format_exception(ValueError(holder))):
            assert keys.secret.decode() not in str(text)
