"""Makes the certificates of a test with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

NAME = "job.ttp.test"


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


CRL = """
[ca]
default_ca = own
[own]
database = {0}/index.txt
crlnumber = {0}/crlnumber
default_md = sha256
"""


class Authority:
    """Signs certificates; all files are in ``directory``."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self.directory, self.name = directory, name
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        _openssl("req", "-x509", *curve, "-nodes", "-keyout", self._key, "-out", self.certificate, "-days", 100,
                 "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip

    def sign(self, name: str = NAME, *, days: int = 90, password: str = "", file: str = "own") -> dict[str, str]:
        """Return certificate and key of a process, as settings. ``days`` below zero: out of date."""
        cert, key, request = (self.directory / f"{file}.{end}" for end in ("pem", "key", "csr"))
        extension = self.directory / f"{file}.ext"
        extension.write_text(f"subjectAltName=DNS:{name}\n")
        secret = ("-passout", f"pass:{password}") if password else ("-nodes",)
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *secret, "-keyout", key,
                 "-out", request, "-subj", f"/CN={name}")  # fmt: skip
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial",
                 "-extfile", extension, "-out", cert, "-days", days)  # fmt: skip
        return {"TTP_TLS_CERT": str(cert), "TTP_TLS_KEY": str(key), "TTP_TLS_CA": str(self.certificate)}

    def revoke(self, *files: str, days: int = 30) -> Path:
        """Revoke these and return the revocation list. ``days`` below zero: the list is out of date."""
        config, listed = self.directory / "ca.cnf", self.directory / f"{self.name}.crl"
        if not config.exists():
            config.write_text(CRL.format(self.directory))
            (self.directory / "index.txt").touch()
            (self.directory / "crlnumber").write_text("01\n")
        signing = ("ca", "-config", config, "-keyfile", self._key, "-cert", self.certificate)
        for file in files:
            _openssl(*signing, "-revoke", self.directory / f"{file}.pem")
        draft = listed.with_suffix(".new")
        dates = (
            ("-crldays", days)
            if days > 0
            else ("-crl_lastupdate", "20200101000000Z", "-crl_nextupdate", "20200102000000Z")
        )
        _openssl(*signing, "-gencrl", *dates, "-out", draft)
        draft.replace(listed)
        return listed
