"""Make an authority of a cluster's own, and certificates for its scheduler, its workers and its clients:

    python cluster/tls/make_certificates.py FOLDER --host scheduler.example --host 10.0.0.1 [--days 7] [--place FOLDER]

FOLDER is new; it has mode 0700, and every file in it mode 0600. The authority's own key is not kept, so no further certificate
can be signed: make new ones before these expire. FOLDER/dask.yaml is Dask's configuration for the scheduler and the workers.
"""

from __future__ import annotations

import argparse
import datetime as dt
import ipaddress
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ROLES = ("scheduler", "worker", "client")
EARLIER = dt.timedelta(minutes=5)  # clocks differ


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        help="a name or an address of the scheduler or a worker; may be repeated",
    )
    parser.add_argument("--days", type=int, default=7, help="how long the certificates are valid")
    parser.add_argument(
        "--place",
        type=Path,
        help="the folder in which processes will find the files, if that is another",
    )
    given = parser.parse_args()
    if given.folder.exists() or not 1 <= given.days <= 397:
        parser.error(
            "FOLDER exists already" if given.folder.exists() else "--days is between 1 and 397"
        )
    write(given.folder, given.host, given.days, given.place or given.folder.absolute())


def write(folder: Path, hosts: list[str], days: int, place: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    key, authority = ec.generate_private_key(ec.SECP256R1()), name("authority of a Dask cluster")
    root = start(authority, authority, key.public_key(), days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    signs = x509.KeyUsage(
        key_cert_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    save(
        folder / "ca.pem",
        root.add_extension(signs, critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM),
    )
    for role in ROLES:
        own = ec.generate_private_key(ec.SECP256R1())
        # scheduler and workers are servers and clients at once: workers talk to each other
        usage = [
            ExtendedKeyUsageOID.CLIENT_AUTH,
            *([] if role == "client" else [ExtendedKeyUsageOID.SERVER_AUTH]),
        ]
        names = x509.SubjectAlternativeName(
            [x509.DNSName(f"dask-{role}"), *map(alternative, hosts)]
        )
        made = start(name(f"dask {role}"), authority, own.public_key(), days).add_extension(
            x509.BasicConstraints(ca=False, path_length=None), True
        )
        made = made.add_extension(names, critical=False).add_extension(
            x509.ExtendedKeyUsage(usage), critical=False
        )
        save(
            folder / f"{role}.pem",
            made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        )
        pem = own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        save(folder / f"{role}-key.pem", pem)
    save(folder / "dask.yaml", yaml.safe_dump(configuration(place), sort_keys=False).encode())


def configuration(folder: Path) -> dict[str, object]:
    tls = {
        role: {"cert": str(folder / f"{role}.pem"), "key": str(folder / f"{role}-key.pem")}
        for role in ROLES
    }
    comm = {"require-encryption": True, "tls": {"ca-file": str(folder / "ca.pem"), **tls}}
    # even without a dashboard, Dask's HTTP servers show everybody what runs
    return {
        "distributed": {
            "comm": comm,
            "scheduler": {"http": {"routes": []}},
            "worker": {"http": {"routes": []}},
        }
    }


def start(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
    )
    return made.not_valid_before(now - EARLIER).not_valid_after(now + dt.timedelta(days=days))


def name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def save(path: Path, content: bytes) -> None:
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(content)


if __name__ == "__main__":
    main()
