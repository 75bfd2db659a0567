"""What the benchmarks read of compiled kernels: operations beside products, cycles on Arm."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last: a build that is under test elsewhere stays in front

from benchmarks import arm, arm_bf16, ports, qemu  # noqa: E402


def test_ports_count_what_stands_beside_the_products():
    """Products in two chains, the second behind a jump, in a loop over tiles."""
    step = ["\tvbroadcastss\t(%rax), %zmm1"] + ["\tvfmadd231ps\t%zmm1, %zmm2, %zmm3"] * 24
    free = ["\tvmovaps\t%zmm0, %zmm3", "\tvxorps\t%xmm4, %xmm4, %xmm4", "\taddq\t$4, %rax"]
    lines = [
        *(".L1:", *free, ".L2:", *step, "\tjne\t.L2", "\tjle\t.L4"),
        *(".L3:", *step, "\tjne\t.L3", "\tvaddps\t(%rsp), %zmm3, %zmm3", ".L4:"),
        *("\tvmovaps\t%zmm2, %zmm3{%k1}", "\tvbroadcastss\t%xmm4, %zmm4", "\tkortestb\t%k1, %k1"),
        *("\tvxorps\t.LC1(%rip), %zmm4, %zmm4", "\tvmovups\t%zmm5, (%rdx)", "\tjg\t.L1"),
    ]
    text = "\n".join(["score_raw:", *lines, "\t.size\tscore_raw, .-score_raw", ""])
    found = ports.panel(text, "score_raw", 24)
    assert found == ports.Panel(vectors=24, loads=1, rest=5, second_chain=1)
    one, two = (ports.Product([found], depth) for depth in (ports.LONG_CHAIN, 64))
    assert (one.beside(), two.beside()) == (4 / 24, 5 / 24)
    assert ports.share((one,)).strip() == f"{100 * 32 / (32 + 4 / 24):.1f}"
    for name, vectors in (("score_none", 24), ("score_raw", 16)):
        with pytest.raises(LookupError, match=name):
            ports.panel(text, name, vectors)


def test_a_trace_of_qemu_has_what_ran_between_two_marks():
    trace = """\
IN: mark
0x00400700:  d65f03c0  ret

Trace 0: 0x7f [00/0000000000400700/00/00] mark
----------------
IN: loop
0x00400724:  25221fe0  .byte    0xe0, 0x1f, 0x22, 0x25
0x00400728:  54ffff61  b.ne     #0x400724

Trace 0: 0x7f [00/0000000000400724/00/00] loop
Trace 0: 0x7f [00/0000000000400724/00/00] loop
Trace 0: 0x7f [00/0000000000400700/00/00] mark
Trace 0: 0x7f [00/0000000000400724/00/00] loop
"""
    (section,) = qemu.parse(trace)
    step = [(".byte", "0xe0, 0x1f, 0x22, 0x25"), ("b.ne", "#0x400724")]
    assert section.instructions() == 2 * step
    assert section.executed() == 4
    assert arm.assembly([*step, ("cbz", "x0, #0x400724"), ("adrp", "x1, #0x492000")]) == (
        ".byte 0xe0, 0x1f, 0x22, 0x25\nb.ne #4\ncbz x0, #4\nadrp x1, #0"
    )
    assert arm.assembly([("bl", "#0x400724"), ("blr", "x4"), ("ret", "")]) == "b #4\n" * 2 + "b #4"


def test_calls_on_arm_join_the_shares_of_their_panels():
    columns = dict.fromkeys(("FMAs", *arm.CORES), 0.5)
    found = {(name, 64): columns for names in arm.CALLS.values() for name in names}
    found[arm.ROWS, 64] = dict.fromkeys(columns, 1)
    joined = arm.calls(found)
    assert joined["forward", 64]["FMAs"] == pytest.approx(2 / 3)
    assert joined["backward", 64]["neoverse-v1"] == pytest.approx(5 / 9)
    assert "| forward | 64 | 0.67 | 67 % | 67 % | 67 % |" in arm.table(joined)


@pytest.mark.skipif(not shutil.which(qemu.DISASSEMBLER), reason=f"needs {qemu.DISASSEMBLER}")
def test_what_the_disassembler_of_qemu_does_not_know_is_decoded():
    unknown, known = (".byte", "0x20, 0xec, 0x42, 0x6e"), ("ldr", "q0, [x1]")
    product = ("bfmmla", "v0.4s, v1.8h, v2.8h")
    assert qemu.decoded([unknown, known, unknown]) == [product, known, product]


def test_a_forward_in_bfloat16_is_the_sum_of_its_parts():
    found = {(64, isa, part): (10.0, 20.0) for isa in arm_bf16.ISAS for part in arm_bf16.PARTS}
    del found[64, "neonbf16", "pack a block of K"]
    assert arm_bf16.total(found, 64, "neonbf16", arm_bf16.PARTS) == (40, 80)
    table = arm_bf16.table(found)
    assert "| times as fast | 64 | 1.00 | 1.25 | 1.00 | 1.25 |" in table


COMPILES = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64") or not shutil.which("gcc"),
    reason="compiles kernels of x86-64 by gcc on Linux",
)


@pytest.mark.slow
@COMPILES
def test_ports_leave_out_the_products_of_the_kernels():
    found = ports.every_product(ports.assembly())
    beside = {label: [product.beside() for product in widths] for label, widths in found.items()}
    # The maximum; the product with P and, from d = 64 on, the sum of two chains.
    assert beside["K Q^T"] == pytest.approx([1] * 4, abs=0.2)
    assert beside["V dO^T, dS"] == pytest.approx([1, 2, 2, 2], abs=0.5)
    assert all(10 < count < 14 for count in beside["exp2(K Q^T), forward"])
    assert all(1 <= count < 2 for label in (ports.ROWS, ports.COLUMNS) for count in beside[label])


@pytest.mark.slow
@COMPILES
@pytest.mark.parametrize("name", ["panels", "tiles"])
def test_programs_that_are_started_by_hand_compile(name, tmp_path):
    flags = ["-O0", "-std=gnu11", "-w", "-fopenmp-simd", "-march=x86-64-v3", "-DSDPA_REAL=32"]
    flags += ["-DSDPA_ISA=avx2", "-DSDPA_ISA_AVX2"]
    source = ROOT / f"benchmarks/{name}.c"
    subprocess.run(["gcc", *flags, source, "-lm", "-o", tmp_path / name], check=True)
