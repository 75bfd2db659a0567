"""One sentence in Chinese per row, for the verdict that it was written for."""

from collections.abc import Iterable

from .record import VERDICTS, Figure, Row

FINDINGS: dict[str, tuple[str, str]] = {
    "mean-var": (
        "reproduced",
        "均值为 0、方差为 d_k，对任何满足条件的分布都成立：标准差在 d_k = 64 时为 "
        "{std raw d_k=64:.2f}，512 时为 {std raw d_k=512:.2f}。",
    ),
    "unit-var": (
        "reproduced",
        "独立分量的缩放后方差为 1，与 d_k 和 n 无关：d_k = 16 时为 "
        "{variance scaled d_k=16 n=64:.3f}，512 时为 {variance scaled d_k=512 n=64:.3f}；训练之后"
        "则不然。",
    ),
    "product-var": (
        "reproduced",
        "公式成立；但键的均值对整行相同，softmax 不受其影响：键的均值为 2 时，总方差为 "
        "{variance over d_k, key mean 2:.2f} d_k，行内方差仍为 "
        "{variance within a row over d_k, key mean 2:.2f} d_k。",
    ),
    "normal": (
        "reproduced",
        "近似成立：与正态分布的 Kolmogorov 距离为 0.1376/d_k，超额峰度为 6/d_k（d_k = 4 时为 "
        "{excess kurtosis d_k=4:.2f}，64 时为 {excess kurtosis d_k=64:.2f}）。",
    ),
    "three-sigma": (
        "reproduced",
        "在所印位数内成立；d_k 较小时尾部更重，d_k = 16 时有 {share scaled within 3, d_k=16:.2%} "
        "落在三倍标准差之内（正态分布为 99.73%）。d_k = 512 时，分数超过 100 的概率为 "
        "{probability that a score is beyond 100, d_k=512:.1e}。",
    ),
    "init-var": (
        "reproduced",
        "若 1/sqrt(dim) 是方差则成立；若是标准差，则方差为 1/dim（dim = 64 时为 "
        "{variance of q k, 1/sqrt(dim) the std, dim=64:.4f}）。",
    ),
    "toy-512": (
        "reproduced",
        "平均而言成立（{std raw d_k=512, mean of tensors:.1f} 与 "
        "{std scaled d_k=512, mean of tensors:.2f}）；但单个张量只有 18 个分数，波动很大：小于"
        " 20 的概率为 {share of tensors with a std below 20:.2f}，大于 25 的概率为 "
        "{share of tensors with a std above 25:.2f}。",
    ),
    "toy-var": (
        "reproduced",
        "平均值成立；但同行同列的分数相关，d_k = 64 时单次打印的误差为 "
        "{std of one printed variance over d_k, d_k=64:.1%}，而一万个独立的分数只会有 1.4%。",
    ),
    "softmax-raw": ("reproduced", "在所印位数内成立：最大的权重只比 1 小 {weight 4:.1e}。"),
    "softmax-scaled": (
        "corrected",
        "所印的数之和为 2，不可能是权重；正确值为 {weight 1:.3f}、{weight 2:.3f}、{weight 3:.3f}"
        "、{weight 4:.3f}、{weight 5:.3f}，p(1-p) 最小只有 {smallest p(1-p):.4f}，是所称下界的五"
        "分之一。",
    ),
    "exp-values": ("corrected", "数值正确，但 e^50 只超出 float16 的范围。"),
    "jacobian": (
        "reproduced",
        "公式对任何 n、平坦或尖锐的行都成立，与中心差分相差 "
        "{formula against differences, n=10 std=8:.0e}。",
    ),
    "saturated": (
        "reproduced",
        "在可印的位数内成立：其余权重为 {weight 2:.1e}，雅可比的最大元素约为 1.6e-21。",
    ),
    "shift": (
        "reproduced",
        "两点都成立：差别只是舍入误差（{largest relative difference, float64, n=64:.0e}）；分数的"
        "标准差为 50 时，float32 中不减最大值有 {rows not finite, plain, std 50, float32:.0%} 的"
        "行溢出，减去之后没有。",
    ),
    "overflow-64": ("corrected", "只有 float16 在不减最大值时溢出；缩放防止的是饱和，不是溢出。"),
    "entropy-table": (
        "corrected",
        "趋势正确，数值有误：不缩放为 {entropy unscaled d_k=16:.2f}、"
        "{entropy unscaled d_k=64:.2f}、{entropy unscaled d_k=256:.2f}，缩放后为 "
        "{entropy scaled d_k=16:.2f}、{entropy scaled d_k=64:.2f}、{entropy scaled d_k=256:.2f}；"
        "2.3 即 ln 10，是权重全部相等时的熵。",
    ),
    "maxweight-table": ("corrected", "趋势正确，数值有误：未缩放时最大权重接近 1。"),
    "grad-law": ("corrected", "未缩放时均方根反而增大，而典型的行趋于零；缩放后不变（d_v 固定）。"),
    "other-scales": (
        "corrected",
        "sqrt(d_k) 使方差为 1，但并非梯度最大者；最佳尺度取决于长度。",
    ),
    "train-infer": ("corrected", "在答案为单个键的任务上只有变小才有害；MiniLM 则两个方向都有害。"),
    "no-scale-training": ("reproduced", "不缩放则收敛更差，d_k 越大、序列越长越明显。"),
    "scale-cost": ("reproduced", "在指数运算处相乘的内核里几乎没有开销。"),
    "table3-rowB": (
        "refuted",
        "表中没有未缩放的模型；缩放的模型在 d_k 变小时变差：d_k 由 64 降到 32 和 16，BLEU 由"
        " 25.8 降到 25.4 和 25.1。",
    ),
    "additive-small-dk": (
        "reproduced",
        "d_k = 8 时相当（点积的损失多 {loss dot over additive d_k=8:.2f}），32 时加性注意力更好（"
        "多 {loss dot over additive d_k=32:.2f}）。",
    ),
    "additive-no-scale": ("refuted", "确实不需要缩放，但分数的界是 |w| 之和，而不是 1。"),
    "additive-cost": (
        "corrected",
        "加性注意力的时间为 n^2 d + n d^2；分块计算时都不需要矩阵。",
    ),
    "additive-speed": ("refuted", "两者都实现得好时，只相差几倍。"),
    "memory": ("corrected", "公式需要 n^2；精确的分块注意力不需要。"),
    "attention-rows": (
        "reproduced",
        "三条都成立；但 exp 下溢后权重不再严格递增：d_k = 1024 且不缩放时，"
        "{pairs with equal weights, unscaled d_k=1024 n=32:.0%} 的相邻分数权重相等，几乎全为 0。",
    ),
    "dv-differs": ("reproduced", "d_v 可以与 d_k 不同：宽度为 1、3、200 的输出都与矩阵乘积一致。"),
    "backward": ("reproduced", "两个公式都成立；有缩放因子时两者都乘以它。"),
    "weight-grad": (
        "corrected",
        "应为 X^T dL/dQ；笔记的公式只有在 d_k = d_model 时才有定义，而且相对误差为 "
        "{relative error of dL/dQ X^T:.2f}。",
    ),
    "swap": (
        "reproduced",
        "确实不同，相差 {relative difference, n=64 d_k=64:.0%}：按行归一化破坏了对称性。",
    ),
    "init-symmetric": (
        "reproduced",
        "统计等价；但每次抽取的矩阵远非对称：反对称部分占 {skew d_k=64:.2f}。",
    ),
    "divergence": ("corrected", "取决于任务，且没有正反馈：对称任务中两者趋近。"),
    "grads-differ": (
        "reproduced",
        "两者近似正交，距离为 {distance n=8:.2f}（n = 8）和 {distance n=64:.2f}（n = 64）；即使"
        " Q = K 也不相等，相距 {distance Q=K n=64:.2f}。",
    ),
    "tied-kv": ("corrected", "瓶颈在宽度，而不在冲突：两个梯度近似正交。"),
    "cosine-bilinear": (
        "corrected",
        "余弦相似度反而需要放大：64 个权重中最大的只有 {largest weight, cosine d_k=64:.3f}，几乎"
        "等于 1/64；双线性与点积一样饱和（d_k = 64 时为 "
        "{largest weight, bilinear unscaled d_k=64:.2f}）。",
    ),
    "batchnorm-analogy": ("refuted", "只在开始时成立：常数跟不上学到的东西。"),
    "temperature": (
        "reproduced",
        "成立；每行的温度还取决于查询的模长，它与 sqrt(d_k) 之比在 d_k = 16 时波动 "
        "{spread of |q|/sqrt(d_k), d_k=16 n=10:.2f}，512 时波动 "
        "{spread of |q|/sqrt(d_k), d_k=512 n=64:.3f}。",
    ),
    "stop-learning": ("refuted", "会学，只是很慢；结论取决于步数。"),
    "unscaled-position": (
        "corrected",
        "集中在少数键上（32 个键中的 {keys that count, unscaled d_k=64 n=32:.1f} 个），但不偏向任"
        "何位置：首尾两个键合计 {weight on first and last key, unscaled d_k=64 n=32:.3f}，正是任"
        "意两个键的 2/32；位置偏好来自输入或训练。",
    ),
    "dk-independence": ("refuted", "宽度低于任务所需时不成立。"),
    "glorot-unit-var": (
        "corrected",
        "只有 d_k = d_model 时成立：d_model = 512 时，q 的分量方差在 d_k = 16 时为 "
        "{variance of a component of q, Glorot, d_k=16:.2f}，64 时为 "
        "{variance of a component of q, Glorot, d_k=64:.2f}。",
    ),
    "sigma-law": (
        "corrected",
        "应为 dim sigma^4：q 与 k 各带来一个 sigma^2；只有 sigma = 1 时两者一致。",
    ),
    "cosine-analogy": (
        "corrected",
        "两个模长之积约为 d_k，而不是 sqrt(d_k)：d_k = 64 时，随机向量余弦的标准差只有 "
        "{std of cosines d_k=64:.3f}，缩放后的分数则为 1。",
    ),
    "noncommute": ("corrected", "两者互为转置；不相等与交换律无关。"),
    "dot-no-params": (
        "reproduced",
        "点积本身不加参数，加性注意力多 2dh + h 个；从一层的输入算起则几乎相同，只多出 v_a 的 "
        "{parameters of additive attention beyond W^Q and W^K, d=64 h=64:.0f} 个。",
    ),
    "universal": (
        "reproduced",
        "transformers 库里 {models with attention:.0f} 个含注意力的模型目录中，"
        "{share of models with 1/sqrt of a width:.1%} 如此。",
    ),
    "layer-norm": (
        "corrected",
        "作用不同：它使输入的方差为 1，但 d_k = 64 时 q·k 的方差仍为 "
        "{variance unscaled d_k=64, inputs normalised:.0f}。",
    ),
    "saturated-gradient": ("refuted", "梯度仍然回传，其范数并不小。"),
    "unstable-training": (
        "reproduced",
        "就学习率的敏感度而言成立：合适的学习率范围更窄；但可训练的最大学习率只略低。",
    ),
    "trained-exponent": (
        "corrected",
        "只在训练前成立；训练使指数从 1/2 升到 1，此即 1/d_k 的依据。",
    ),
}
"""By id: the verdict, and what is right if it is that; {FIGURE:FORMAT} stands for a value."""


def finding(name: str, verdict: str, figures: Iterable[Figure]) -> str:
    """What is right, with its figures; nothing if the verdict is not that of the sentence.

    Examples
    --------
    >>> from sdpa_lab.claims.chinese import finding
    >>> from sdpa_lab.claims.record import Figure
    >>> finding("swap", "reproduced", [Figure("relative difference, n=64 d_k=64", 1.1, 1, 2, 9)])
    '确实不同，相差 110%：按行归一化破坏了对称性。'
    >>> finding("swap", "undecided", [])
    ''
    """
    expected, sentence = FINDINGS[name]
    values = {figure.name: figure.value for figure in figures}
    return sentence.format_map(values) if expected == verdict else ""


def bilingual(rows: Iterable[Row]) -> str:
    """The rows as they print themselves, each with its verdict and finding in Chinese.

    Examples
    --------
    >>> from sdpa_lab.claims import ledger
    >>> from sdpa_lab.claims.chinese import bilingual
    >>> print(bilingual(ledger(["softmax-raw"])).splitlines()[-1])
      结论     复现：在所印位数内成立：最大的权重只比 1 小 8.3e-07。
    """
    texts = []
    for row in rows:
        sentence = finding(row.claim.id, row.verdict, row.figures)
        end = f"：{sentence}" if sentence else "。"
        texts.append(f"{row}\n  结论     {VERDICTS[row.verdict]}{end}")
    return "\n\n".join(texts)
