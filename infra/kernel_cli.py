"""`headrace kernels`: what the kernels for GPUs take of one, and how they are best cut on this one."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from infra.command_line import fail

app = typer.Typer(no_args_is_help=True, help="Kernels for GPUs.")


@app.command()
def tune(
    out: Annotated[
        Path | None, typer.Option(help="Folder for DEVICE.json; default: where kernels look for it.")
    ] = None,
) -> None:
    """Measure on this machine's GPU how kernels are best cut, and write it down for it. Takes minutes.

    Kernels on this kind of device are then cut so; a worker says at its start whether they are.
    """
    import torch

    from kernels.tuned import FOLDER, file_name

    if not torch.cuda.is_available():
        raise fail("no NVIDIA GPU is here: nothing can be measured")
    from kernels.tune import tune as measure_all

    console = Console()
    device = torch.device("cuda", 0)
    table = measure_all(device, datetime.now(UTC).date().isoformat(), console.print)
    folder = FOLDER if out is None else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file_name(table.device)
        path.write_text(table.to_json())
    except OSError as e:
        raise fail(str(e)) from None
    console.print(f"{len(table.entries)} cases: {path}")


@app.command()
def aot(
    out: Annotated[Path, typer.Option(help="Folder for ARCH/NAME.cubin and report.json.")],
    arch: Annotated[
        list[str] | None, typer.Option(help="sm_80, sm_90 or sm_100, more than once; default: all.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only kernels with this in their name.")] = "",
) -> None:
    """Compile every kernel for the shapes of known models; report registers, shared memory and spills.

    Fails where a kernel spills registers or takes more shared memory than the device has.
    """
    # Triton is not needed by the other commands.
    from kernels.aot import ARCHS, compile_all
    from kernels.launch_shapes import all_launches

    unknown = set(arch or ()) - ARCHS.keys()
    if unknown:
        raise fail(f"--arch {', '.join(sorted(unknown))} is not known; known are {', '.join(ARCHS)}")
    launches = {name: launch for name, launch in all_launches().items() if only in name}
    if not launches:
        raise fail(f"--only {only}: no kernel has this in its name")
    table = Table("arch", Column("kernel", overflow="fold"), "registers", "shared bytes", "spilled bytes")
    report: dict[str, dict[str, dict[str, int]]] = {}
    faults = []
    try:
        for target in (ARCHS[name] for name in arch or ARCHS):
            folder = out / target.name
            folder.mkdir(parents=True, exist_ok=True)
            report[target.name] = {}
            for name, compiled in compile_all(launches, target):
                (folder / f"{name}.cubin").write_bytes(compiled.cubin)
                report[target.name][name] = compiled.report()
                table.add_row(
                    target.name,
                    name,
                    str(compiled.registers),
                    str(compiled.shared_bytes),
                    str(compiled.spill_bytes),
                )
                if compiled.spill_bytes or compiled.shared_bytes > target.shared_bytes:
                    faults.append(f"{target.name} {name}")
        (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    except (OSError, RuntimeError) as e:
        raise fail(str(e)) from None
    Console().print(table)
    if faults:
        raise fail(f"spills, or more shared memory than the device has: {', '.join(faults)}")
