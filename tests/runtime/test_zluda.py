"""ZLUDA's libraries and streams, by stand-ins of both families."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.runtime import compile_worker, hip, layouts, libraries, zluda
from lib_rocm_sd.runtime.zluda import Nvcuda, Zluda
from tests.verify import zluda_library
from tests.verify.zluda_library import BOXED, PLAIN, UNKNOWN

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=[BOXED, PLAIN], ids=["boxed", "plain"])
def here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zluda:
    return zluda_library.built(tmp_path_factory.mktemp("zluda"), *request.param)


def modules(monkeypatch: pytest.MonkeyPatch, *names: str | Path) -> None:
    """What is loaded into the process."""
    monkeypatch.setattr(hip, "loaded_libraries", lambda: iter(map(Path, names)))


def test_the_hip_library_is_the_one_that_nvcuda_calls(
    here: Zluda, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, other = ctypes.CDLL(str(here.nvcuda)), "/opt/rocm/lib/libbeneath.so.7"
    monkeypatch.setattr(zluda, "AMDHIP64", zluda_library.HIP)
    modules(monkeypatch, other, here.hip, here.nvcuda)
    assert zluda.loaded() == here and library
    modules(monkeypatch, other, here.nvcuda)
    with pytest.raises(LaunchError, match=r"nothing says which .* loaded are \['/opt/rocm"):
        zluda.loaded()


def test_a_delayed_version_7_is_6_where_only_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Windows has it before the first of its functions was called."""
    monkeypatch.setattr(hip, "called_by", lambda path: path)
    monkeypatch.setattr(libraries, "imports", lambda path: {"k.dll": 0, "amdhip64_7.dll": 8})
    monkeypatch.setattr(layouts, "WINDOWS", True)
    modules(monkeypatch, "nvcuda.dll", "amdhip64_6.dll")
    assert zluda.loaded().hip == Path("amdhip64_6.dll")
    modules(monkeypatch, "nvcuda.dll", "amdhip64_6.dll", "AMDHIP64_7.DLL")
    assert zluda.loaded().hip == Path("AMDHIP64_7.DLL")
    modules(monkeypatch, "nvcuda.dll", "a/amdhip64_7.dll", "b/amdhip64_7.dll")
    with pytest.raises(LaunchError, match="nothing says which HIP library"):
        zluda.loaded()


def test_no_nvcuda_or_two_of_them_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, "/usr/lib/libc.so.6")
    with pytest.raises(LaunchError, match="nvcuda is loaded 0 times"):
        zluda.loaded()
    modules(monkeypatch, "/a/nvcuda.dll", "/b/NVCUDA.DLL")
    with pytest.raises(LaunchError, match="nvcuda is loaded 2 times"):
        zluda.loaded()


def test_a_stream_is_hips(here: Zluda) -> None:
    library = ctypes.CDLL(str(here.nvcuda))
    nvcuda, handle = Nvcuda(library), ctypes.c_uint64()
    assert library.cuStreamCreate(ctypes.byref(handle), 1) == 0
    assert nvcuda.unknown() == ""
    stream = nvcuda.hip_stream(handle.value)
    assert (stream != handle.value) == nvcuda.has_objects
    synchronise = ctypes.CDLL(str(here.hip)).hipStreamSynchronize
    assert synchronise(ctypes.c_void_p(stream)) == 0


def test_what_it_does_not_take_for_a_stream_is_a_launch_error(tmp_path: Path) -> None:
    nvcuda = Nvcuda(ctypes.CDLL(str(zluda_library.built(tmp_path, *BOXED).nvcuda)))
    none = ctypes.create_string_buffer(64)
    with pytest.raises(LaunchError, match=r"zluda_get_hip_object failed \(400\)"):
        nvcuda.hip_stream(ctypes.addressof(none))


def test_an_unknown_version_has_only_the_default_stream(tmp_path: Path) -> None:
    nvcuda = Nvcuda(ctypes.CDLL(str(zluda_library.built(tmp_path, *UNKNOWN).nvcuda)))
    assert "reports CUDA 11080 and exports no zluda_get_hip_object" in nvcuda.unknown()
    with pytest.raises(LaunchError, match="only the default stream"):
        nvcuda.hip_stream(4096)


def test_the_driver_translates_and_refuses_a_recording(
    here: Zluda, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, library = ctypes.c_uint64(), ctypes.CDLL(str(here.nvcuda))
    assert library.cuStreamCreate(ctypes.byref(handle), 1) == 0
    monkeypatch.setattr(zluda, "loaded", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    translate = zluda.driver().translate
    assert translate is not None
    assert translate(handle.value) == Nvcuda(library).hip_stream(handle.value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match="recording"):
        translate(handle.value)


def test_its_digest_is_of_what_the_file_has(tmp_path: Path) -> None:
    file = tmp_path / "nvcuda.dll"
    file.write_bytes(b"3.9.5")
    before = Zluda(file, file).digest
    file.write_bytes(b"3.9.6")
    assert Zluda(file, file).digest != before


def test_what_zluda_calls_is_loaded_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On Windows HIP may be System32's, and rocBLAS the SDK's, which PATH alone names."""
    system, sdk, own = (tmp_path / name for name in ("System32", "ROCm", ".zluda"))
    hip_file, blas, cublas = system / "amdhip64_6.dll", sdk / "rocblas.dll", own / "cublas64_11.dll"
    zludas = Zluda(own / "nvcuda.dll", hip_file)
    others = [tmp_path / "torch" / "cudart64_12.dll", sdk / "other.dll"]
    modules(monkeypatch, *others, hip_file, blas, zludas.nvcuda, cublas)
    assert zludas.companions() == [hip_file, zludas.nvcuda, blas, cublas]
    missing, loads = {blas}, list[Path]()

    def load(path: Path) -> None:
        loads.append(path)
        if path in missing:
            raise OSError(f"{path.name} is not there")

    monkeypatch.setattr(compile_worker, "load", load)
    compile_worker.load_before_torch([*map(str, zludas.companions())])
    assert loads == zludas.companions()
    missing.add(zludas.nvcuda)
    with pytest.raises(OSError, match=r"nvcuda\.dll is not there"):
        compile_worker.load_before_torch([*map(str, zludas.companions())])
