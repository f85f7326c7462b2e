"""An authority and two certificates, made for one run: both TLS contestants authenticate both sides, as a channel of peers does.

P-256, because gRPC's BoringSSL takes no Ed25519 certificates by default; valid for a day, for 127.0.0.1 only.
"""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Certificates", "make_certificates"]


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts.  The server makes them and hands the client its part over a pipe; they are worth nothing to anybody else."""

    authority: str
    server: str
    server_key: str
    client: str
    client_key: str

    def for_client(self) -> dict[str, str]:
        """All but the server's secrets."""
        return {key: value for key, value in asdict(self).items() if not key.startswith("server")}


def make_certificates() -> Certificates:
    """A new authority and what it signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("bench authority")
    authority = _builder(name, name, key.public_key(), is_authority=True).sign(key, hashes.SHA256())
    pems = []
    for common_name in ("bench server", "bench client"):
        own = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(common_name), name, own.public_key(), is_authority=False)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        pems += [_pem(builder.sign(key, hashes.SHA256())), _key_pem(own)]
    return Certificates(_pem(authority), *pems)


def context(*, server_side: bool, authority: str, own: str, own_key: str) -> ssl.SSLContext:
    """TLS 1.3 and nothing below, the other side's certificate required."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=authority)
    with tempfile.TemporaryDirectory() as folder:  # the module reads its own certificate from files only
        file = Path(folder) / "own.pem"
        file.touch(mode=0o600)
        file.write_text(own_key + own)
        made.load_cert_chain(file)
    return made


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, is_authority: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
