"""Where compiled kernels are kept (BR-45), and how compilations are counted."""

import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils as dynamo
from tiny_models import model_config

from fluxbatch.models import compile_cache
from fluxbatch.models.compile_cache import Compiled, CompileWatch, is_on_network, keep_compiled
from fluxbatch.user_cache import cache_folder, temporary_folder

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 (x)")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "node"))


def mounts(tmp_path: Path, *lines: str) -> Path:
    table = tmp_path / "mounts"
    table.write_text("".join(f"{line} rw 0 0\n" for line in ("/dev/sda / ext4", *lines)))
    return table


def kept(environ: dict[str, str], **settings: object) -> dict[str, str]:
    keep_compiled(model_config(**settings), GPU, environ)
    return environ


def test_both_caches_stand_under_the_users_cache_by_versions_gpu_and_recipe(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        environ = kept({"HOME": str(tmp_path)}, quantization="fp8")
    inductor, triton = Path(environ["TORCHINDUCTOR_CACHE_DIR"]), Path(environ["TRITON_CACHE_DIR"])
    assert inductor.parent == triton.parent and inductor.parent.parent == tmp_path / ".cache" / "fluxbatch" / "compiled"
    assert inductor.parent.name.startswith(f"torch{torch.__version__}-NVIDIA-H200-x--auto-fp8-off-")
    assert str(inductor) in caplog.text and str(triton) in caplog.text
    assert kept({"HOME": str(tmp_path)}, quantization="fp8") == environ, "the next run finds it again"
    assert kept({"HOME": str(tmp_path)}, kernels="diffusers") != environ


def test_br45_a_home_on_a_shared_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home of all"
    mounted = str(home).replace(" ", "\\040")
    monkeypatch.setattr(compile_cache, "MOUNTS", mounts(tmp_path, f"server:/home {mounted} nfs4"))
    environ = kept({"HOME": str(home)})
    assert Path(environ["TRITON_CACHE_DIR"]).is_relative_to(temporary_folder())
    assert not home.exists()


def test_br45_what_the_user_has_set_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        environ = kept({"HOME": str(tmp_path), "TRITON_CACHE_DIR": "/scratch/mine"})
    assert environ["TRITON_CACHE_DIR"] == "/scratch/mine" and "/scratch/mine (TRITON_CACHE_DIR)" in caplog.text
    assert Path(environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)
    environ = kept({"HOME": str(tmp_path)}, compile_cache=str(tmp_path / "chosen"))
    assert Path(environ["TRITON_CACHE_DIR"]).is_relative_to(tmp_path / "chosen")


def test_br45_a_folder_that_cannot_be_written_to_falls_back_with_a_warning(tmp_path: Path, caplog) -> None:
    (tmp_path / "full").write_text("no folder")
    environ = kept({"HOME": str(tmp_path / "full")})
    assert Path(environ["TRITON_CACHE_DIR"]).is_relative_to(temporary_folder())
    assert "cannot keep compiled kernels" in caplog.text


def test_a_cpu_needs_no_cache() -> None:
    environ: dict[str, str] = {}
    keep_compiled(model_config(), torch.device("cpu"), environ)
    assert environ == {}


@pytest.mark.parametrize(
    ("kind", "shared"),
    [("nfs", True), ("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("gpfs", True), ("xfs", False),
     ("tmpfs", False), ("overlay", False)],
)  # fmt: skip
def test_br45_the_innermost_mount_says_whether_others_share_it(tmp_path: Path, kind: str, shared: bool) -> None:
    table = mounts(tmp_path, "a /net nfs", f"b /net/home {kind}")
    assert is_on_network(Path("/net/home/me/.cache"), table) is shared
    assert is_on_network(Path("/net/other"), table)
    assert not is_on_network(Path("/var"), table)
    assert not is_on_network(Path("/var"), tmp_path / "no table")


def test_the_users_cache_has_a_place_even_without_a_home(tmp_path: Path) -> None:
    assert cache_folder({"FLUXBATCH_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/fluxbatch")
    assert cache_folder({"HOME": "/c"}) == Path("/c/.cache/fluxbatch")
    assert cache_folder({}) == temporary_folder()


def test_graphs_and_kernels_are_counted_and_a_cache_hit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CompileWatch()
    before = watch.read()
    counters = {**dynamo.counters, "inductor": dynamo.counters["inductor"].copy()}
    counters["inductor"]["fxgraph_cache_miss"] += 2
    counters["inductor"]["fxgraph_cache_hit"] += 1
    metrics = {"_compile.compile_inner": [*dynamo.compilation_time_metrics.get("_compile.compile_inner", []), 1.5]}
    monkeypatch.setattr(dynamo, "counters", counters)
    monkeypatch.setattr(dynamo, "compilation_time_metrics", metrics)
    watch._on_kernel(src=None, times=types.SimpleNamespace(total=500_000), cache_hit=False)
    watch._on_kernel(src=None, times=types.SimpleNamespace(total=9), cache_hit=True)
    assert watch.read() - before == Compiled(graphs=2, kernels=1, from_cache=2, seconds=2.0)
    assert str(watch.read() - before) == "compiled 2 graphs and 1 kernels in 2.0 s, 2 more came from the cache"


@pytest.mark.slow
def test_the_folders_are_settled_before_diffusers_imports_a_compiler(tmp_path: Path) -> None:
    code = (
        "from fluxbatch.config import ModelConfig; from fluxbatch.models import load_model; "
        "load_model(ModelConfig(name='tiny', family='flux1', guidance='embedded', dtype='float32', device='cpu', "
        "compile='aot', compile_cache=sys.argv[1]), true_cfg_scale=1.0); "
        "print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    environ = {key: value for key, value in os.environ.items() if key not in compile_cache.VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", f"import os, sys; {code}", str(tmp_path)],
        env=environ, cwd=Path(__file__).parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
