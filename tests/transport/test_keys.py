import pytest

from paceline.errors import UsageError
from paceline.transport.keys import create_keys, load_keys


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
    with pytest.raises(UsageError, match=r"may be read by others \(mode 640\): run `chmod 600 "):
        load_keys(path)
    for content in ("", "x", "a b", "é" * 40 + " " + "b" * 40, "a" * 40 + " " + "b" * 40):
        path.write_text(content)
        path.chmod(0o600)
        with pytest.raises(UsageError, match="holds no key pair"):
            load_keys(path)
