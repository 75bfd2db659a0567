"""Attention composed around the kernel: other scores, relative positions, rotations, a layer.

cosine.py       scores that are cosines of angles
bilinear.py     scores that are bilinear forms of query and key
shaw.py         learned vectors for relative positions, in scores and output
_band.py        the parts of that attention: near distances in blocks, far ones at once
rotary.py       rotary position embedding
multi_head.py   the layer: projections around attention
_scores.py      options that change a single score, for formulas written out

They stand on the package's base: _arguments.py (checks), _arrays.py (types and sums), _compose.py
(calls of the kernel with prepared operands). All public names are exported by `sdpa`.
"""
