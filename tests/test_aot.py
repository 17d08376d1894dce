"""Packages that are compiled ahead of time draw what the modules draw, and are found, refused and replaced by name."""

import json
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import AutoencoderKL
from test_parity import MIXED, distance, pixels
from tiny_models import MAX_SEQUENCE_LENGTH, VAE, flux1_transformer, loud, model_config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fluxbatch.command import run_command
from fluxbatch.errors import ConfigError
from fluxbatch.models import load_model, tuning
from fluxbatch.models.aot import parts, toolkit
from fluxbatch.models.aot.build import build, prove
from fluxbatch.models.aot.forward import Package, install
from fluxbatch.models.aot.packages import Wanted, publishing, read_key
from fluxbatch.models.aot.parts import Call, Part, parts_of
from fluxbatch.pipeline import ahead
from fluxbatch.records import Bucket

CPU = torch.device("cpu")
TEXT, IMAGE, WIDTH, HEAD = MAX_SEQUENCE_LENGTH, 16, 32, 16
Outputs = tuple[Tensor, Tensor]


def single_part(*, seed: int = 0) -> Part:
    """The single blocks of a FLUX.1 of random weights."""
    torch.manual_seed(seed)
    transformer = loud(flux1_transformer(), gain=2.0)
    vae = nn.Module()
    vae.decoder, vae.config = nn.Identity(), {}  # type: ignore[assignment]
    return parts_of(transformer, vae, attention="native")[1]


def arguments(rows: int = 2, *, seed: int = 1) -> dict[str, Any]:
    """Of one call, each row with numbers of its own."""
    numbers = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers)

    rotary = (normal(TEXT + IMAGE, HEAD), normal(TEXT + IMAGE, HEAD))
    return {
        "hidden_states": normal(rows, IMAGE, WIDTH),
        "encoder_hidden_states": normal(rows, TEXT, WIDTH),
        "temb": normal(rows, WIDTH),
        "image_rotary_emb": rotary,
        "joint_attention_kwargs": None,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One package: the single block of two rows. Read only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # it is part of the key
    made = tmp_path_factory.mktemp("ahead")
    part = single_part()
    build(wanted(part, made), part.modules[0], device=CPU)
    yield made
    torch.set_num_threads(threads)


def wanted(part: Part, folder: Path, rows: int = 2) -> Wanted:
    return Wanted.of(part, Call.of((), arguments(rows)), folder=folder, device=CPU)


def packaged(part: Part, folder: Path) -> nn.Module:
    install(part, folder=folder, device=CPU)
    return part.modules[0]


def draw(block: nn.Module, given: dict[str, Any]) -> Outputs:
    with torch.inference_mode():
        return block(**given)


# --- what it computes -------------------------------------------------------------------------------------------------


def assert_close(ours: Outputs, theirs: Outputs) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_package_computes_what_its_module_computes_and_compiles_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = single_part()
    theirs = draw(part.modules[0], arguments())
    block = packaged(part, folder)
    block.proj_out.forward = lambda x: pytest.fail("the module itself was called")
    with caplog.at_level(logging.INFO):
        ours = draw(block, arguments())
    assert_close(ours, theirs)
    assert not torch.equal(ours[0], theirs[0]) or not torch.equal(ours[1], theirs[1]), "the module's own bits"
    assert caplog.text.count("loaded FluxSingleTransformerBlock") == 1


def test_one_package_serves_every_checkpoint_of_the_architecture(folder: Path) -> None:
    first, second = single_part(seed=0), single_part(seed=5)
    theirs = draw(second.modules[0], arguments())
    assert not torch.allclose(theirs[0], draw(first.modules[0], arguments())[0], atol=0.1), "the same weights"
    assert wanted(first, folder).path == wanted(second, folder).path
    assert_close(draw(packaged(second, folder), arguments()), theirs)


def test_a_row_keeps_its_bits_whatever_its_neighbours_and_its_slot(folder: Path) -> None:
    block, given = packaged(single_part(), folder), arguments()
    turned = {name: value.flip(0) if isinstance(value, Tensor) else value for name, value in given.items()}
    forth, back = draw(block, given), draw(block, turned)
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(forth, back, strict=True))


def test_tensors_with_gaps_are_taken_as_what_they_hold(folder: Path) -> None:
    block, given = packaged(single_part(), folder), arguments()
    wide = torch.cat([given["hidden_states"], torch.full((2, 3, WIDTH), 1e6)], dim=1)
    gaps = {**given, "hidden_states": wide[:, :IMAGE]}
    assert not gaps["hidden_states"].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(draw(block, given), draw(block, gaps), strict=True))


def test_a_launch_of_another_size_runs_on_the_module_and_says_so_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = single_part()
    theirs = draw(part.modules[0], arguments(1))
    block = packaged(part, folder)
    ours = [draw(block, arguments(1)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs, strict=True))
    assert caplog.text.count("these launches run uncompiled") == 1


class Starved:
    """A loader whose allocator found no room, which machine code reports as a failed call."""

    def boxed_run(self, tensors: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("run_func_(...) API call failed at model_container_runner.cpp, line 190")


@pytest.mark.parametrize(("counted", "kind"), [(4, torch.OutOfMemoryError), (3, RuntimeError)])
def test_out_of_memory_in_a_package_is_told_as_such_so_that_the_launch_is_halved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, counted: int, kind: type
) -> None:
    package = Package(wanted(single_part(), folder).path, CPU)
    package._device, package._ooms, package._loader = torch.device("cuda:0"), 3, Starved()
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_ooms": counted})
    with pytest.raises(RuntimeError) as caught:
        package([])
    assert type(caught.value) is kind


# --- which package ----------------------------------------------------------------------------------------------------


def test_a_package_of_other_versions_is_not_taken_and_the_difference_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = single_part()
    assert wanted(part, folder).problem() is None
    ours = parts.versions()
    monkeypatch.setattr(parts, "versions", lambda: {**ours, "torch": "9.9.9"})
    assert wanted(part, folder).problem() == f"there is one for torch {torch.__version__}, here 9.9.9"


@pytest.mark.parametrize(
    "change",
    [
        {"attention": "_native_cudnn"},
        {"settings": {"num_attention_heads": 4}},
        {"modules": [nn.Linear(2, 2)]},
        {"modules": [single_part().modules[0].to(torch.bfloat16)]},
    ],
    ids=["attention", "architecture", "weights", "dtype"],
)
def test_whatever_changes_the_code_changes_the_key(folder: Path, change: dict[str, Any]) -> None:
    part = single_part()
    assert wanted(replace(part, **change), folder).path != wanted(part, folder).path


def test_how_many_blocks_there_are_changes_no_key(folder: Path) -> None:
    part = single_part()
    more = replace(part, settings={**part.settings}, modules=[*part.modules, *single_part(seed=3).modules])
    assert "num_layers" not in part.settings and wanted(more, folder).path == wanted(part, folder).path


def copied(folder: Path, target: Path, content: bytes) -> Wanted:
    package = wanted(single_part(), target)
    package.path.write_bytes(content)
    return package


def test_a_torn_package_and_a_flipped_bit_are_named_and_never_loaded(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = wanted(single_part(), folder).path.read_bytes()
    at = whole.index(b"ELF") + 5000  # in the machine code
    flipped = bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]])
    for content in (whole[: len(whole) // 2], b"", flipped):
        package = copied(folder, tmp_path, content)
        problem = package.problem()
        assert problem is not None and f"{package.path} is damaged" in problem
        draw(packaged(single_part(), tmp_path), arguments())
        assert "is damaged" in caplog.text
        caplog.clear()
    assert copied(folder, tmp_path, whole).problem() is None


def test_a_foreign_package_under_our_name_is_not_taken(folder: Path, tmp_path: Path) -> None:
    package = wanted(single_part(), tmp_path)
    with zipfile.ZipFile(package.path, "w") as archive:
        archive.writestr("model/wrapper_metadata.json", json.dumps({"fluxbatch": json.dumps({"part": "another"})}))
    assert "is another package" in (package.problem() or "")
    with zipfile.ZipFile(package.path, "w") as archive:
        archive.writestr("model/wrapper_metadata.json", json.dumps({}))
    assert "no key of ours in it" in (package.problem() or "")


def test_a_package_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "block.pt2"
    with pytest.raises(RuntimeError), publishing(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError("the compiler was killed")
    assert list(path.parent.iterdir()) == []
    for content in (b"first", b"second"):
        with publishing(path) as temporary:
            temporary.write_bytes(content)
            assert not path.exists() or path.read_bytes() == b"first"
    assert [entry.name for entry in path.parent.iterdir()] == ["block.pt2"] and path.read_bytes() == b"second"


DEADLY = "__attribute__((constructor)) static void die(void) { *(volatile int *)0 = 0; }"


def test_a_package_that_kills_whoever_loads_it_is_found_out_before_it_is_published(
    folder: Path, tmp_path: Path
) -> None:
    sound, deadly = wanted(single_part(), folder).path, tmp_path / "deadly.pt2"
    library = tmp_path / "library.so"
    compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=DEADLY, text=True, check=True)
    with zipfile.ZipFile(sound) as held, zipfile.ZipFile(deadly, "w") as made:
        for name in held.namelist():
            made.writestr(name, library.read_bytes() if name.endswith(".so") else held.read(name))
    with pytest.raises(RuntimeError, match="a process that loads the package is ended by SIGSEGV"):
        prove(deadly, CPU)
    prove(sound, CPU)


@pytest.mark.gpu
def test_a_package_for_the_gpu_computes_what_its_module_computes(tmp_path: Path) -> None:
    device, part = torch.device("cuda"), single_part()
    block = part.modules[0].to(device)
    given = pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, arguments())
    theirs = draw(block, given)
    package = Wanted.of(part, Call.of((), given), folder=tmp_path, device=device)
    build(package, block, device=device)
    install(part, folder=tmp_path, device=device)
    assert_close(draw(block, given), theirs)


def symbols(package: Path, into: Path, *options: str) -> set[str]:
    """The names in a package's library, as nm lists them."""
    with zipfile.ZipFile(package) as archive:
        library = archive.extract(next(name for name in archive.namelist() if name.endswith(".so")), into)
    listed = subprocess.run(["nm", *options, library], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listed.stdout.splitlines()}


def assert_sealed(package: Path, into: Path) -> None:
    shown = symbols(package, into, "-D", "--defined-only")
    assert "AOTInductorModelContainerRun" in shown
    assert all(name.startswith("AOTInductor") for name in shown)


def test_a_package_shows_the_process_nothing_of_its_own_but_what_the_loader_asks_for(
    folder: Path, tmp_path: Path
) -> None:
    assert_sealed(next(folder.glob("*.pt2")), tmp_path)


@pytest.mark.slow
def test_a_package_whose_compiler_links_a_c_library_of_its_own_is_as_sealed_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them in one process, each with symbols of the other, end it."""
    compiler = tmp_path / "g++"
    static = '#!/bin/sh\ncase "$*" in *" -shared "*) exec g++ "$@" -static-libstdc++;; *) exec g++ "$@";; esac\n'
    compiler.write_text(static, encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # precompiled headers are large
    part = single_part()
    package = wanted(part, tmp_path)
    with torch._inductor.config.patch({"cpp.cxx": (str(compiler),)}):
        build(package, part.modules[0], device=CPU)
    assert_sealed(package.path, tmp_path)
    assert "_ZNSt6locale7classicEv" in symbols(package.path, tmp_path), "no C++ library of its own: nothing was asked"
    assert_close(draw(packaged(part, tmp_path), arguments()), draw(single_part().modules[0], arguments()))


# --- what a job needs -------------------------------------------------------------------------------------------------


def tiny(**changes: Any) -> Any:
    return model_config(compile="aot", max_sequence_length=64, **changes)


def test_steps_need_no_package_of_their_own_and_a_second_pass_needs_twice_the_rows() -> None:
    once = ahead.needed(tiny(), [(Bucket(64, 64, 3), 2)])
    assert [package.part.name for package in once] == [
        "FluxTransformerBlock", "FluxSingleTransformerBlock", "AutoencoderKLDecoder",
    ]  # fmt: skip
    assert {package.path for package in ahead.needed(tiny(), [(Bucket(64, 64, n), 2) for n in (1, 7)])} == {
        package.path for package in once
    }
    guided = ahead.needed(tiny(), [(Bucket(64, 64, 3, negative_pass=True), 1)])
    assert {package.path for package in guided} == {package.path for package in once}


def test_full_size_models_are_rehearsed_without_their_weights() -> None:
    for name, family, blocks in (("flux1_dev", "flux1", "Flux"), ("flux2_klein_9b", "flux2", "Flux2")):
        cfg = tiny(name=name, family=family, random_weights=True, dtype="bfloat16")
        double, single, decoder = ahead.needed(cfg, [(Bucket(1024, 1024, 4), 4)])
        assert (double.part.name, single.part.name) == (f"{blocks}TransformerBlock", f"{blocks}SingleTransformerBlock")
        assert double.call.shapes[0].shape[:2] == (4, 4096) and decoder.call.shapes[0].shape[2:] == (128, 128)


def test_a_decoder_in_channels_last_has_the_same_key_with_numbers_and_without() -> None:
    def strides() -> list[tuple[int, ...]]:
        vae = AutoencoderKL(**VAE)
        tuning.turn_channels_last(vae.decoder)
        return [tensor.stride() for tensor in parts.weights_of(vae.decoder).values()]

    with FakeTensorMode():
        without = strides()
    assert without == strides() and any(stride[1:2] == (1,) and stride[0] > 8 for stride in without)


def job(tmp_path: Path, *words: str) -> list[str]:
    rows = {"id": ["a", "b", "c"], "prompt": ["a red circle", "a blue square", "a green star"]}
    pq.write_table(pa.table({**rows, **{name: [64] * 3 for name in ("height", "width")}}), tmp_path / "rows.parquet")
    return [
        f"manifest.path={tmp_path / 'rows.parquet'}", "sampler.num_inference_steps=2", "plan.batch_size=2",
        "model.device=cpu", "model.compile=aot", f"output.dir={tmp_path / 'run'}", *words,
    ]  # fmt: skip


def test_a_run_without_its_packages_is_refused_and_the_refusal_names_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fluxbatch"])
    monkeypatch.setattr("fluxbatch.models.load_model", lambda *_, **__: pytest.fail("weights were read"))
    assert run_command(["run", *job(tmp_path)]) == 2
    refusal = capsys.readouterr().err.splitlines()[-1]
    assert "lacks FluxTransformerBlock of float32[2, 16, 192] and 2 more packages (not made yet)" in refusal
    assert "python -m fluxbatch compile" in refusal and "model.aot_missing=build" in refusal


def test_build_makes_what_is_missing_or_damaged_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def instead(package: Wanted, module: nn.Module, *, device: torch.device) -> None:
        assert type(module).__name__ in (package.part.name, "Decoder")
        made.append(package.path)

    monkeypatch.setattr("fluxbatch.models.aot.build.build", instead)
    monkeypatch.setattr(Wanted, "problem", lambda self: None if "Single" in self.path.name else "not made yet")
    ahead.settle(replace(tiny(), aot_missing="build"), [(Bucket(64, 64, 3), 2)])
    assert [path.name.partition("-")[0] for path in made] == ["FluxTransformerBlock", "AutoencoderKLDecoder"]
    with pytest.raises(ConfigError, match="FluxTransformerBlock"):
        ahead.settle(tiny(), [(Bucket(64, 64, 3), 2)])


def test_plan_says_what_would_be_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fluxbatch"])
    assert run_command(["plan", *job(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "compiled ahead of time: 1 launch shape" in told and "  64x64, 2 a launch" in told
    assert run_command(["plan", *job(tmp_path), "model.compile=off"]) == 0
    assert "ahead of time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model.kernels=fused"], "model.compile must be off with model.kernels=fused, got aot"),
        (["model.quantization=fp8"], "model.quantization=fp8 needs model.kernels=auto or fused and model.compile=off"),
        (
            ["model.quantization=int8_weight_only"],
            "model.quantization must be none with model.compile=aot, got int8_weight_only",
        ),
        (["model.aot_missing=never"], "model.aot_missing must be one of refuse, build, got 'never'"),
    ],
)
def test_what_cannot_be_compiled_ahead_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["fluxbatch"])
    for verb in ("run", "compile"):
        assert run_command([verb, *job(tmp_path, *words)]) == 2
        assert sentence in capsys.readouterr().err.splitlines()[-1]


# --- whole jobs, compiled for real ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_pixels_are_those_of_the_modules_and_need_no_compiler_at_the_next_start(
    family: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, name = request.getfixturevalue(f"{family}_base"), "flux1_dev" if family == "flux1" else "flux2_klein_4b"
    guidance = "embedded" if family == "flux1" else "none"
    cfg = model_config(name=name, family=family, path=str(base), guidance=guidance, compile_cache=str(tmp_path))
    rows = MIXED[:2]
    theirs = pixels(load_model(cfg, true_cfg_scale=2.0), rows)
    aot = replace(cfg, compile="aot", aot_missing="build")
    ahead.settle(aot, [(Bucket(64, 64, 3), 2)])
    ahead.settle(replace(aot, aot_missing="refuse"), [(Bucket(64, 64, 3), 2)])
    ours = pixels(load_model(aot, true_cfg_scale=2.0), rows)
    assert max(distance(a, b) for a, b in zip(ours, theirs, strict=True)) <= 1
    assert "uncompiled" not in caplog.text
    again = subprocess.run(
        [sys.executable, "-c", SECOND_START, json.dumps({"compile": "aot", "name": name, "family": family,
         "path": str(base), "guidance": guidance, "compile_cache": str(tmp_path)}), str(tmp_path / "again.npy")],
        env={**os.environ, "CXX": "/bin/false", "CC": "/bin/false"}, cwd=Path(__file__).parent, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert "torch._inductor" not in again.stdout, "the compilers were imported"
    assert (np.load(tmp_path / "again.npy") == np.stack(ours)).all()


SECOND_START = """
import json, sys
import numpy as np
from test_parity import MIXED, pixels
from tiny_models import model_config
from fluxbatch.models import load_model
import fluxbatch.models.aot.forward as forward
forward.logger.warning = lambda *words: sys.exit(f"a warning: {words}")
drawn = pixels(load_model(model_config(**json.loads(sys.argv[1])), true_cfg_scale=2.0), MIXED[:2])
np.save(sys.argv[2], np.stack(drawn))
print([name for name in sys.modules if name in ("torch._inductor.compile_fx", "torch._inductor.codecache")])
"""


@pytest.mark.slow
def test_two_processes_that_compile_at_once_leave_one_sound_package_each(tmp_path: Path) -> None:
    words = ["compile", *job(tmp_path, f"model.compile_cache={tmp_path / 'cache'}")]
    both = [
        subprocess.Popen([sys.executable, "-m", "fluxbatch", *words], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    made = sorted((tmp_path / "cache" / "ahead").iterdir())
    assert len(made) == 3 and all(read_key(path)["part"] in path.name for path in made)
    run = subprocess.run([sys.executable, "-m", "fluxbatch", *words[1:]], capture_output=True, text=True)
    assert run.returncode == 0 and "uncompiled" not in run.stderr and run.stderr.count("loaded ") == 3, run.stderr


# --- a machine without a CUDA toolkit ---------------------------------------------------------------------------------


def test_pips_packages_and_the_driver_make_a_toolkit_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in toolkit.SEARCHED:
        monkeypatch.delenv(name, raising=False)
    include, driver = tmp_path / "site" / "nvidia" / "cu13" / "include", tmp_path / "libcuda.so.580.1"
    driver.write_bytes(b"")
    for name in ("cuda.h", "cuda_runtime_api.h"):
        (include / name).parent.mkdir(parents=True, exist_ok=True)
        (include / name).write_text("")
    with pytest.raises(OSError, match=r"no crt/host_defines.h, nv/target in pip's packages: .*fluxbatch\[aot\]"):
        toolkit.toolkit_of_links(tmp_path / "home", packages=tmp_path / "site", driver=driver)
    other = tmp_path / "other"
    for name in ("crt/host_defines.h", "nv/target"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text("")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", f"/nowhere:{other}")
    for _ in range(2):
        home = toolkit.toolkit_of_links(tmp_path / "home", packages=tmp_path / "site", driver=driver)
    assert (home / "include" / "cuda.h").exists() and (home / "lib64" / "libcuda.so").resolve() == driver.resolve()
