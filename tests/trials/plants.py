"""Faults to plant in attention's kernel: what a trial in a child has to survive."""

from __future__ import annotations

START = "    Kernel(p, memory).run();"
PLANTS = {
    "outside": "    if (thread_id() == 0) *(volatile u32*)((u64)p.out + (1ull << 40)) = 1;\n"
    + START,
    "endless": "    for (u64 i = 0; *(volatile u32*)p.q + (i >> 60) != 0x12345678u; ++i) {}\n"
    + START,
    "lane": START + "\n    if (thread_id() == 3) ((u16*)p.out)[block_id() * 8 + 3] ^= 0x4000;",
}
"""By name: what stands in attention.hip instead of START."""
