"""Identity: published ids, one spelling, keys that cannot be shared by accident."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import Code
from wire.identity import (
    DOMAINS,
    HANDSHAKE,
    ROUND,
    SIGNED,
    SMALL_ORDER_Y,
    Identity,
    KeyFileError,
    PeerId,
    base58_decode,
    base58_encode,
    lock_data_folder,
)

P = 2**255 - 19

# Published by others.  The key pair: test vectors of the libp2p peer-ids specification.  The texts: node keys 1 and 2 of the
# Substrate documentation, which prints the peer ids that rust-libp2p derives; and the example id of the peer-ids specification.
SPEC_PRIVATE = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_PUBLIC = bytes.fromhex("080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
PUBLISHED_IDS = {
    1: "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp",
    2: "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD",
}
SPEC_ID = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"

ids = st.integers(0, 2**256 - 1).map(lambda seed: Identity(seed.to_bytes(32, "big")).peer_id)


def test_published_key_file_and_ids(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SPEC_PRIVATE)
    path.chmod(0o600)
    identity = Identity.load(path)
    assert identity.peer_id.raw == SPEC_PUBLIC[4:]
    assert base58_decode(str(identity.peer_id)) == b"\x00\x24" + SPEC_PUBLIC
    for seed, text in PUBLISHED_IDS.items():
        assert str(Identity(seed.to_bytes(32, "big")).peer_id) == text
    assert str(PeerId.parse(SPEC_ID)) == SPEC_ID


def test_rfc_8032_key() -> None:
    """Test 1 of RFC 8032, section 7.1; its message is empty, which no domain allows, so only the key pair is compared."""
    identity = Identity(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert identity.peer_id.raw.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"


@given(ids)
def test_text_and_back(peer_id: PeerId) -> None:
    text = str(peer_id)
    assert len(text) == 52 and text.startswith("12D3KooW")
    assert PeerId.parse(text) == peer_id and hash(PeerId.parse(text)) == hash(peer_id)
    assert peer_id.short == text[-6:]


@given(st.binary(max_size=40))
def test_base58_and_back(data: bytes) -> None:
    assert base58_decode(base58_encode(data)) == data


@given(ids, st.integers(0, 51), st.characters(codec="ascii"))
def test_any_other_spelling_is_another_id_or_refused(peer_id: PeerId, at: int, char: str) -> None:
    text = str(peer_id)
    changed = text[:at] + char + text[at + 1 :]
    if changed == text:
        return
    try:
        other = PeerId.parse(changed)
    except ValueError:
        return
    assert other != peer_id and str(other) == changed


@pytest.mark.parametrize(
    "text",
    [
        "",
        SPEC_ID[:-1],
        SPEC_ID + "1",
        "1" + SPEC_ID[:-1],
        " " + SPEC_ID[1:],
        SPEC_ID.replace("e", "0", 1),
        SPEC_ID.replace("e", "l", 1),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # an RSA id
        "z" * 52,
        "1" * 52,
        SPEC_ID[:-1] + "é",
    ],
)
def test_not_an_id(text: str) -> None:
    with pytest.raises(ValueError):
        PeerId.parse(text)


@pytest.mark.parametrize("y", sorted(SMALL_ORDER_Y))
@pytest.mark.parametrize("sign", [0, 1])
def test_small_order_keys_are_refused(y: int, sign: int) -> None:
    with pytest.raises(ValueError, match="small order"):
        PeerId((y | sign << 255).to_bytes(32, "little"))


def test_the_refused_values_are_the_torsion_points() -> None:
    """Referee: the curve's own addition law; eight times such a point is the neutral one, and there are no others."""
    d = -121665 * pow(121666, -1, P) % P

    def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        (x1, y1), (x2, y2) = a, b
        k = d * x1 * x2 * y1 * y2 % P
        return (x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P

    assert len(SMALL_ORDER_Y) == 7
    points = set()
    for y in SMALL_ORDER_Y:
        y %= P
        square = (y * y - 1) * pow(d * y * y + 1, -1, P) % P
        x = pow(square, (P + 3) // 8, P)
        if (x * x - square) % P:
            x = x * pow(2, (P - 1) // 4, P) % P
        assert (x * x - square) % P == 0
        for point in ((x, y), (-x % P, y)):
            points.add(point)
            for _ in range(3):
                point = add(point, point)
            assert point == (0, 1)
    assert len(points) == 8  # the whole torsion subgroup


@pytest.mark.parametrize("y", [P + 2, P + 18, 2**255 - 1])
def test_a_key_that_is_not_canonical_is_refused(y: int) -> None:
    with pytest.raises(ValueError, match="canonical"):
        PeerId(y.to_bytes(32, "little"))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_has_32_bytes(size: int) -> None:
    with pytest.raises(ValueError):
        PeerId(b"\x11" * size)


@given(st.lists(ids, min_size=2, max_size=5))
def test_ordered_by_bytes(several: list[PeerId]) -> None:
    assert [p.raw for p in sorted(several)] == sorted(p.raw for p in several)
    assert max(several).raw == max(p.raw for p in several)


def test_a_signature_counts_for_its_domain_data_and_key_only() -> None:
    one, two = Identity.generate(), Identity.generate()
    signature = one.sign(SIGNED, b"data")
    assert one.peer_id.verify(SIGNED, b"data", signature)
    assert not one.peer_id.verify(HANDSHAKE, b"data", signature)
    assert not one.peer_id.verify(SIGNED, b"dat", signature)
    assert not two.peer_id.verify(SIGNED, b"data", signature)
    assert not one.peer_id.verify(SIGNED, b"data", signature[:-1])
    assert not one.peer_id.verify(SIGNED, b"data", b"")
    for bit in range(0, 512, 7):
        flipped = bytearray(signature)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not one.peer_id.verify(SIGNED, b"data", bytes(flipped))


def test_a_second_signature_made_from_the_first_is_refused() -> None:
    """Ed25519 is malleable when S is not reduced: S + L would verify, too."""
    identity = Identity.generate()
    signature = identity.sign(SIGNED, b"data")
    order = 2**252 + 27742317777372353535851937790883648493
    twin = signature[:32] + (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
    assert not identity.peer_id.verify(SIGNED, b"data", twin)


def test_domains_are_a_closed_set_and_none_begins_another() -> None:
    assert {SIGNED, HANDSHAKE, ROUND} == DOMAINS
    for one in DOMAINS:
        assert not any(other.startswith(one) for other in DOMAINS - {one})
    identity = Identity.generate()
    for domain in (b"", b"plw-signed/2", SIGNED + b"x"):
        with pytest.raises(ValueError):
            identity.sign(domain, b"x")
        with pytest.raises(ValueError):
            identity.peer_id.verify(domain, b"x", bytes(64))


def test_bytes_that_are_no_point_verify_nothing() -> None:
    for y in range(2, 40):
        try:
            peer_id = PeerId(y.to_bytes(32, "little"))
        except ValueError:
            continue
        assert not peer_id.verify(SIGNED, b"x", bytes(64))


def test_the_key_is_in_no_text() -> None:
    seed = os.urandom(32)
    identity = Identity(seed)
    assert str(identity.peer_id) in repr(identity)
    assert seed.hex() not in repr(identity) + str(identity)
    import copy

    with pytest.raises(TypeError):
        copy.copy(identity)


# --- key files


@pytest.mark.parametrize("umask", [0, 0o277])
def test_created_once_private_and_whole(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "new" / "key"
    path.parent.mkdir()
    old = os.umask(umask)
    try:
        identity = Identity.load_or_create(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == identity.peer_id == Identity.load(path).peer_id
    assert os.listdir(path.parent) == ["key"]  # no scratch file stays
    with pytest.raises(FileExistsError):
        Identity.generate().save(path)
    assert Identity.load(path).peer_id == identity.peer_id
    assert os.listdir(path.parent) == ["key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o610, 0o644, 0o602])
def test_a_key_that_others_can_use_refuses_the_start(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    Identity.generate().save(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError) as failure:
        Identity.load(path)
    assert str(path) in str(failure.value) and "chmod 600" in str(failure.value) and failure.value.local
    path.chmod(0o600)
    Identity.load(path)


@pytest.mark.parametrize("change", ["truncated", "longer", "empty", "prefix", "public", "seed"])
def test_a_damaged_key_file(tmp_path: Path, change: str) -> None:
    path = tmp_path / "key"
    Identity.generate().save(path)
    data = bytearray(path.read_bytes())
    assert len(data) == 68
    if change == "truncated":
        del data[-1]
    elif change == "longer":
        data += b"\x00"
    elif change == "empty":
        data.clear()
    else:
        data[{"prefix": 1, "public": 40, "seed": 10}[change]] ^= 1
    path.write_bytes(data)
    with pytest.raises(KeyFileError, match=str(path)):
        Identity.load(path)


def test_an_unreadable_key_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyFileError, match=r"No such file.*check the path"):
        Identity.load(tmp_path / "absent")
    with pytest.raises(KeyFileError, match="not a file"):
        Identity.load(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(KeyFileError, match="not a file"):
        Identity.load(tmp_path / "fifo")

    path = tmp_path / "key"
    Identity.generate().save(path)

    def denied(*_args: object, **_keywords: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # root may read everything, so the kernel's answer is put in its place
    with pytest.raises(KeyFileError) as failure:
        Identity.load(path)
    assert str(path) in str(failure.value) and "Permission denied" in str(failure.value) and "owner" in str(failure.value)
    with pytest.raises(KeyFileError, match="writable"):
        Identity.load_or_create(tmp_path / "other")


def test_of_two_creators_the_second_takes_the_key_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    first = Identity.generate()
    real = os.link

    def link_after_the_other(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", real)
        first.save(path)
        real(source, target)

    monkeypatch.setattr(os, "link", link_after_the_other)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert os.listdir(tmp_path) == ["key"]


# --- the lock of the data folder


def test_two_users_of_one_data_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with lock_data_folder(folder):
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
        with pytest.raises(KeyFileError) as failure, lock_data_folder(folder):
            pass
        assert failure.value.code is Code.DUPLICATE_IDENTITY
        assert str(folder) in str(failure.value) and str(os.getpid()) in str(failure.value)
    with lock_data_folder(folder):
        pass


@pytest.mark.processes
def test_another_process_holds_the_folder_and_a_kill_frees_it(tmp_path: Path) -> None:
    program = (
        "import sys; from wire.identity import lock_data_folder\n"
        "with lock_data_folder(sys.argv[1]):\n    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(KeyFileError, match=str(other.pid)), lock_data_folder(tmp_path):
            pass
        other.kill()
        other.wait(30)
    with lock_data_folder(tmp_path):
        pass


def test_a_data_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFileError, match="data folder"), lock_data_folder(tmp_path / "file" / "data"):
        pass
