"""Settings: which place wins, and that a wrong value is reported with the place it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from plnode.exits import BadInput
from plnode.settings import SettingsError, load_settings, parse_size
from wire.address import Scope


def test_defaults_and_what_must_be_given(tmp_path: Path) -> None:
    settings = load_settings({"data": str(tmp_path)}, {})
    assert settings.data_dir == tmp_path
    assert settings.scope is Scope.INTERNET
    assert (settings.device, settings.threads, settings.memory_bytes, settings.seeds) == ("cpu", 1, None, ())
    assert [str(a) for a in settings.listen] == ["/ip4/0.0.0.0/tcp/0"]
    assert settings.status_socket == tmp_path / "status.sock"
    with pytest.raises(SettingsError, match="--data"):
        load_settings({}, {})


def test_the_nearer_place_wins(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('name = "file"\nthreads = 2\ndevice = "cuda"\ndata = "/file"\nscope = "lan"\n')
    environment = {"PLNODE_NAME": "env", "PLNODE_THREADS": "3", "PATH": "/bin", "PLNODE_SETTINGS": str(file)}
    settings = load_settings({"name": "flag", "data": None}, environment)
    assert (settings.name, settings.threads, settings.device) == ("flag", 3, "cuda")
    assert settings.data_dir == Path("/file")
    assert settings.scope is Scope.LAN


def test_port_mapping_is_off_unless_set(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('portmap = "on"\n')
    assert not load_settings({"data": "/d"}, {}).portmap
    assert load_settings({"data": "/d"}, {}, file=file).portmap
    assert load_settings({"data": "/d"}, {"PLNODE_PORTMAP": "on"}).portmap
    assert not load_settings({"data": "/d", "portmap": "off"}, {"PLNODE_PORTMAP": "on"}).portmap


def test_how_long_a_stop_waits() -> None:
    assert load_settings({"data": "/d"}, {}).stop_grace_s == 10
    assert load_settings({"data": "/d"}, {"PLNODE_STOP_GRACE": "45"}).stop_grace_s == 45


def test_the_data_folder_does_not_follow_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN-3"""
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"data": "here", "seeds": "seeds.txt"}, {})
    monkeypatch.chdir("/")
    assert settings.data_dir == tmp_path / "here"
    assert settings.seeds == (str(tmp_path / "seeds.txt"),)


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({"listen": "nonsense"}, {}, "settings: listen: expected host:port"),
        ({"listen": "127.0.0.1:1,nonsense"}, {}, "listen"),
        ({"memory": "much"}, {}, 'memory: expected a size such as "6GiB" or "800MB", got "much"'),
        ({"name": ""}, {}, "name: expected a text, 1 to 32"),
        ({"name": "a\nb"}, {}, "printable"),
        ({}, {"PLNODE_THREADS": "many"}, 'PLNODE_THREADS: expected a whole number, from 1 to 1,024, got "many"'),
        ({}, {"PLNODE_THREADS": "0"}, "PLNODE_THREADS"),
        ({}, {"PLNODE_THREAD": "2"}, 'PLNODE_THREAD: expected a known key, perhaps "threads"'),
        ({}, {"PLNODE_LISTEN": "x"}, "PLNODE_LISTEN"),
        ({}, {"PLNODE_PORTMAP": "yes"}, 'PLNODE_PORTMAP: expected a text, one of "off", "on", got "yes"'),
        ({}, {"PLNODE_STOP_GRACE": "1"}, "PLNODE_STOP_GRACE: expected a whole number, from 2 to 600"),
        ({}, {"PLNODE_DEVICE": "tpu"}, 'PLNODE_DEVICE: expected a text, one of "cpu", "cuda", got "tpu"'),
    ],
)
def test_a_wrong_setting_names_its_place(flags: dict[str, str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"data": "/d", **flags}, environment)
    assert message in str(refused.value)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("threads = 0\n")
    with pytest.raises(SettingsError) as refused:
        load_settings({"data": "/d"}, {}, file=file)
    assert f"{file} threads" in str(refused.value)
    file.write_text("threads =\n")
    with pytest.raises(BadInput, match="line 1"):
        load_settings({"data": "/d"}, {}, file=file)
    with pytest.raises(BadInput, match="cannot read the settings file"):
        load_settings({"data": "/d"}, {}, file=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024), ("6GiB", 6 << 30), ("6 GiB", 6 << 30), ("800MB", 800_000_000), ("1.5k", None), ("1.5KB", 1500),
        ("0", None), ("-1GB", None), ("GiB", None), ("", None), ("nanB", None), ("1e400", None), ("5TB", None),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size
