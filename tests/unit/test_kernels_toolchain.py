from pathlib import Path

from kernels.toolchain import launcher_problem


def test_what_triton_cannot_compile_without_is_told(tmp_path: Path) -> None:
    tools, include = tmp_path / "bin", tmp_path / "include"
    tools.mkdir()
    include.mkdir()
    environ = {"PATH": str(tools)}
    assert "need a C compiler" in str(launcher_problem(environ, include))
    assert "Python.h" in str(launcher_problem(environ | {"CC": "/opt/cc"}, include))
    compiler = tools / "clang"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert "Python.h" in str(launcher_problem(environ, include))
    (include / "Python.h").touch()
    assert launcher_problem(environ, include) is None
