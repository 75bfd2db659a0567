"""One sentence in Chinese per row, for the verdict that it was written for."""

from collections.abc import Iterable

from .record import VERDICTS, Row

FINDINGS: dict[str, tuple[str, str]] = {
    "mean-var": ("reproduced", "均值为 0、方差为 d_k，对任何满足条件的分布都成立。"),
    "unit-var": ("reproduced", "独立分量的缩放后方差为 1，与 d_k 和 n 无关；训练之后则不然。"),
    "product-var": ("reproduced", "公式成立；但键的均值对整行相同，softmax 不受其影响。"),
    "normal": ("reproduced", "近似成立：与正态分布的距离为 0.1376/d_k，峰度超出 6/d_k。"),
    "three-sigma": ("reproduced", "在所印位数内成立；d_k 较小时尾部更重。"),
    "init-var": ("reproduced", "若 1/sqrt(dim) 是方差则成立；若是标准差，则方差为 1/dim。"),
    "toy-512": ("reproduced", "平均而言成立；但单个张量只有 18 个分数，波动很大。"),
    "toy-var": ("reproduced", "平均值成立；同行同列的分数相关，单次打印的误差约为两倍。"),
    "softmax-raw": ("reproduced", "在笔记的精度内成立。"),
    "softmax-scaled": ("corrected", "所印的数之和为 2，不可能是权重；正确值见英文。"),
    "exp-values": ("corrected", "数值正确，但 e^50 只超出 float16 的范围。"),
    "jacobian": ("reproduced", "公式对任何 n、平坦或尖锐的行都成立。"),
    "saturated": ("reproduced", "在可印的位数内成立；雅可比的最大元素约为 1.6e-21。"),
    "shift": ("reproduced", "差别只是舍入误差；减去最大值后不再溢出。"),
    "overflow-64": ("corrected", "只有 float16 在不减最大值时溢出；缩放防止的是饱和，不是溢出。"),
    "entropy-table": ("corrected", "趋势正确，数值有误：2.3 是权重全部相等时的熵。"),
    "maxweight-table": ("corrected", "趋势正确，数值有误：未缩放时最大权重接近 1。"),
    "grad-law": ("corrected", "未缩放时均方根反而增大，而典型的行趋于零；缩放后不变（d_v 固定）。"),
    "other-scales": (
        "corrected",
        "sqrt(d_k) 使方差为 1，但并非梯度最大者；最佳尺度取决于长度。",
    ),
    "train-infer": ("corrected", "在答案为单个键的任务上只有变小才有害；MiniLM 则两个方向都有害。"),
    "no-scale-training": (
        "depends on the horizon",
        "只是慢：d_k = 64 时所需步数约为缩放时的 12 倍；1200 步之后损失已接近 0。",
    ),
    "no-scale-length": (
        "depends on the horizon",
        "序列长时学得更慢，但训练足够久后与短序列相同。",
    ),
    "scale-cost": ("reproduced", "在指数运算处相乘的内核里几乎没有开销。"),
    "table3-rowB": ("refuted", "表中没有未缩放的模型；缩放的模型在 d_k 变小时变差。"),
    "additive-small-dk": ("reproduced", "d_k = 8 时相当，32 时加性注意力更好。"),
    "additive-no-scale": ("corrected", "确实不需要缩放，但分数的界是 |w| 之和，而不是 1。"),
    "additive-cost": (
        "corrected",
        "加性注意力的时间为 n^2 d + n d^2；分块计算时都不需要矩阵。",
    ),
    "additive-speed": ("corrected", "两者都实现得好时，只相差几倍。"),
    "memory": ("corrected", "公式需要 n^2；精确的分块注意力不需要。"),
    "attention-rows": ("reproduced", "三条都成立；exp 下溢后权重不再严格递增。"),
    "dv-differs": ("reproduced", "可以不同。"),
    "backward": ("reproduced", "两个公式都成立；有缩放因子时两者都乘以它。"),
    "weight-grad": ("corrected", "应为 X^T dL/dQ。"),
    "swap": ("reproduced", "确实不同：按行归一化破坏了对称性。"),
    "init-symmetric": ("reproduced", "统计等价；但每次抽取的矩阵远非对称。"),
    "divergence": ("corrected", "取决于任务：两者之和与之差同样增长；对称任务中两者趋近。"),
    "feedback": (
        "depends on the horizon",
        "学习最快的阶段确有自我增强，但和与差同样增长，并随损失下降而结束。",
    ),
    "grads-differ": ("reproduced", "两者近似正交；即使 Q = K 也不相等。"),
    "tied-kv": (
        "corrected",
        "只在宽度容不下两种角色时（4）是瓶颈；宽度为 8 时只是慢，32 时没有差别。",
    ),
    "tied-conflict": ("corrected", "两个梯度近似正交，谈不上冲突。"),
    "cosine-bilinear": ("corrected", "余弦需要反方向的因子；双线性与点积一样饱和。"),
    "batchnorm-analogy": ("refuted", "只在开始时成立：常数跟不上学到的东西。"),
    "temperature": ("reproduced", "成立；每行的温度还取决于查询的长度。"),
    "stop-learning": ("depends on the horizon", "会学，只是很慢；结论取决于步数。"),
    "unscaled-position": ("corrected", "集中在少数键上，但不偏向任何位置；位置偏好来自训练。"),
    "dk-independence": ("refuted", "宽度低于任务所需时不成立。"),
    "glorot-unit-var": ("corrected", "只有 d_k = d_model 时成立。"),
    "sigma-law": ("corrected", "应为 dim sigma^4。"),
    "cosine-analogy": ("corrected", "两个模长之积约为 d_k，而不是 sqrt(d_k)。"),
    "noncommute": ("corrected", "两者互为转置；不相等与交换律无关。"),
    "dot-no-params": ("reproduced", "点积本身不加参数；计入投影后两者几乎相同。"),
    "universal": ("reproduced", "transformers 库中九成以上的模型如此。"),
    "layer-norm": ("corrected", "作用不同：它给输入单位方差，q·k 的方差仍为 d_k。"),
    "saturated-gradient": ("refuted", "梯度仍然回传，其范数并不小。"),
    "unstable-training": (
        "depends on the horizon",
        "训练足够久后成立（就学习率的敏感度而言）：合适的学习率范围更窄；短训练时尚看不出。",
    ),
    "qk-norm": ("reproduced", "不仅能替代缩放，对学习率还更不敏感。"),
    "first-step": (
        "corrected",
        "取决于优化器：SGD 与 Muon 除以 sqrt(d_k)，Adam 除以 d_k，一步的改变才与 d_k 无关。",
    ),
    "dk-selectivity": (
        "refuted",
        "只在开始时过于平均；训练之后仍有选择性（只是稍弱），损失同样低。",
    ),
    "two-sqrt-harm": ("corrected", "对训练好的模型没有损害；除数过大无害，过小才有害。"),
}
"""By id: the verdict, and what is right if it is that."""


def bilingual(rows: Iterable[Row]) -> str:
    """The rows as they print themselves, each with its verdict and finding in Chinese.

    Examples
    --------
    >>> from sdpa_lab.claims import ledger
    >>> from sdpa_lab.claims.chinese import bilingual
    >>> print(bilingual(ledger(["softmax-raw"])).splitlines()[-1])
      结论     复现：在笔记的精度内成立。
    """
    texts = []
    for row in rows:
        expected, finding = FINDINGS[row.claim.id]
        sentence = f"：{finding}" if expected == row.verdict else "。"
        texts.append(f"{row}\n  结论     {VERDICTS[row.verdict]}{sentence}")
    return "\n\n".join(texts)
