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
    "softmax-scaled": (
        "corrected",
        "所印的数之和为 2，不可能是权重；正确值为 0.002、0.015、0.041、0.112、0.829。",
    ),
    "scaled-derivative": (
        "corrected",
        "最小的 p(1-p) 为 0.0021，是所称下界的五分之一；即使按笔记所印的权重计算，也只有 0.0050。",
    ),
    "exp-digits": (
        "reproduced",
        "七个数值在所印位数内都正确。",
    ),
    "exp-50": (
        "reproduced",
        "四种浮点类型中只有 float16 如此：它在 e^11.09 处溢出；bfloat16 与 float32 到 e^88.7，"
        "float64 到 e^709.8。",
    ),
    "jacobian": ("reproduced", "公式对任何 n、平坦或尖锐的行都成立。"),
    "saturated": ("reproduced", "在可印的位数内成立；雅可比的最大元素约为 1.6e-21。"),
    "shift": ("reproduced", "差别只是舍入误差；减去最大值后不再溢出。"),
    "overflow-64": (
        "corrected",
        "分数本身在任何类型中都不会溢出。溢出的是不减最大值时的指数，而且只在 float16 中；缩放"
        "防止的是饱和，不是溢出。",
    ),
    "numerical-stability": (
        "corrected",
        "按数值分析的含义并非如此：减去最大值之后，有无缩放都是稳定的。不缩放时 float32 的舍入"
        "误差只按 d_k^(1/4) 增大，不到一位十进制数。",
    ),
    "entropy-table": ("corrected", "趋势正确，数值有误：2.3 是权重全部相等时的熵。"),
    "maxweight-table": (
        "corrected",
        "趋势正确，数值有误：未缩放时最大权重为 0.98、0.999、1.000，缩放后为 0.53、0.52、0.52；"
        "笔记的“缩放”一列接近除以 2 sqrt(d_k) 的结果。",
    ),
    "grad-law": (
        "corrected",
        "未缩放时均方根反而按 d_k 的约 0.3 次幂增大，而典型的行趋于零。",
    ),
    "grad-constant": (
        "reproduced",
        "成立，只要 d_v 固定；若 d_v = d_k 且损失为 sum(g out)，则随 g 的范数一起增大。",
    ),
    "steadier-gradients": (
        "reproduced",
        "成立：缩放后各行更均匀地分担梯度；不缩放时少数几行占去几乎全部梯度。",
    ),
    "sqrt-optimal": (
        "reproduced",
        "按笔记的定义成立：只有 1/2 次幂使方差在任何宽度下都为 1。但方差为 1 并不等于学得最好。",
    ),
    "optimal-region": (
        "corrected",
        "n = 10 时成立，键更多时不成立：传到分数的梯度为最大值的 0.97、0.58、0.17（10、64、"
        "1024 个键）。",
    ),
    "dk-variance": (
        "reproduced",
        "成立（训练之前）。",
    ),
    "dk-even": (
        "reproduced",
        "开始时成立：熵达到均匀分布的 99% 以上。训练之后是否有害，是另一个问题。",
    ),
    "two-sqrt-variance": (
        "reproduced",
        "成立：方差为 0.25。",
    ),
    "log-saturates": (
        "corrected",
        "取决于 d_k 与键的个数：d_k = 64 时，10 个键的最大权重为 0.52，64 个键只有 0.29；d_k = "
        "512 时 64 个键仍有 0.56。",
    ),
    "infer-smaller": (
        "reproduced",
        "成立：缩放减小到四分之一，损失明显增大。",
    ),
    "infer-unscaled": (
        "corrected",
        "若答案是单个键则无害：权重更尖锐，选中的仍是同一个键；MiniLM 的嵌入则会改变。",
    ),
    "depth": (
        "reproduced",
        "训练开始时成立：不缩放时，传到第一层的梯度在 1、4、16 层（带残差连接）中约为缩放时的 "
        "2.7、19、460 倍。",
    ),
    "scale-cost": (
        "reproduced",
        "在指数运算处顺便相乘的内核里，对同样的分数几乎没有开销。",
    ),
    "scale-pass": (
        "refuted",
        "单独遍历一次分数矩阵时可以察觉：100 个键时多约 12%，这一步受内存带宽限制。",
    ),
    "no-scale-training": (
        "depends on the horizon",
        "只是慢：d_k = 64 时所需步数是缩放时的许多倍；训练足够久后损失同样低。",
    ),
    "no-scale-length": (
        "depends on the horizon",
        "序列长时学得更慢，但训练足够久后与短序列相同。",
    ),
    "dk-selectivity": (
        "refuted",
        "只在开始时过于平均；训练之后仍有选择性（只是稍弱），损失同样低。",
    ),
    "two-sqrt-harm": ("corrected", "对训练好的模型没有损害；除数过大无害，过小才有害。"),
    "footnote": (
        "reproduced",
        "引文逐字无误，确在第 4 页脚注。",
    ),
    "implicit-assumption": (
        "corrected",
        "论文在脚注 4 中明确写出了这一假设。",
    ),
    "table3-rowB": ("refuted", "表中没有未缩放的模型；缩放的模型在 d_k 变小时变差。"),
    "additive-attribution": (
        "refuted",
        "论文自己的实验既没有加性注意力，也没有不缩放的模型；这一比较引自 Britz 等人 2017 年的"
        "论文。",
    ),
    "additive-small-dk": ("reproduced", "d_k = 8 时相当，32 时加性注意力更好。"),
    "additive-no-scale": (
        "reproduced",
        "成立；但有界的是 tanh，不是分数：分数的界是 |w| 之和。",
    ),
    "tanh-range": (
        "reproduced",
        "成立；但分数是这些数的加权和，本身没有固定的界。",
    ),
    "additive-time": (
        "corrected",
        "每个词只需投影一次：时间为 n^2 d + n d^2，n > d 时与点积同阶。",
    ),
    "dot-time": (
        "reproduced",
        "成立。",
    ),
    "additive-memory": (
        "corrected",
        "按公式逐步计算要存下 n^2 d 个数；分块计算则不需要这样的数组。",
    ),
    "additive-speed": (
        "reproduced",
        "按框架代码的写法成立：在 CPU 单线程上相差一到两个数量级；在 GPU 上随 n、d 和头数增大，"
        "从不到 2 倍到近 300 倍。",
    ),
    "additive-kernels": (
        "corrected",
        "两者都实现得好时，只相差三四倍。",
    ),
    "dot-faster": (
        "reproduced",
        "成立，两种写法都是如此。",
    ),
    "tanh-parallel": (
        "corrected",
        "恰恰相反：逐元素操作互不依赖，并行度最高（每个词对可同时进行的运算为 28 比 18，d = 64"
        "）；慢在内存：要读写 n^2 d 个数。",
    ),
    "memory": (
        "reproduced",
        "成立，只要保存整个权重矩阵。",
    ),
    "memory-needed": (
        "corrected",
        "不必：精确的分块注意力只需要输出的 O(n d) 和每个线程的一小块。",
    ),
    "attention-rows": ("reproduced", "三条都成立；exp 下溢后权重不再严格递增。"),
    "dv-differs": ("reproduced", "可以不同。"),
    "backward": ("reproduced", "两个公式都成立；有缩放因子时两者都乘以它。"),
    "weight-grad": ("corrected", "应为 X^T dL/dQ。"),
    "swap": ("reproduced", "确实不同：按行归一化破坏了对称性。"),
    "init-symmetric": ("reproduced", "统计等价；但每次抽取的矩阵远非对称。"),
    "instances-differ": (
        "reproduced",
        "确实不同：两者几乎正交。",
    ),
    "noncommute": (
        "corrected",
        "两者互为转置；当且仅当 W^Q W^K^T 对称时相等，与交换律无关。",
    ),
    "divergence": ("corrected", "取决于任务：两者之和与之差同样增长；对称任务中两者趋近。"),
    "feedback": (
        "depends on the horizon",
        "学习最快的阶段确有自我增强，但和与差同样增长，并随损失下降而结束。",
    ),
    "grads-differ": ("reproduced", "两者近似正交；即使 Q = K 也不相等。"),
    "grads-structure": (
        "corrected",
        "是同一个公式：交换 Q 与 K 并转置 dL/dS 即可互换。不对称的是 dL/dS 本身，因为只按行归一"
        "化。",
    ),
    "tied-kv": (
        "corrected",
        "只在宽度容不下两种角色时（4）是瓶颈；宽度为 8 时只是慢，32 时没有差别。",
    ),
    "tied-conflict": ("corrected", "两个梯度近似正交，谈不上冲突。"),
    "value-index": (
        "corrected",
        "这是照抄 W^K 一行的笔误：换一个 W^V，权重丝毫不变，V 不参与匹配。",
    ),
    "cosine-no-scale": (
        "reproduced",
        "不会饱和；但余弦相似度反而需要放大，否则几乎没有选择性（64 个键的最大权重仅 0.02）。",
    ),
    "bilinear-no-scale": (
        "reproduced",
        "成立：若矩阵元素的初始方差为 1/d_k^2，缩放就在初始化里；按常用的 1/d_k 则与点积一样饱和。",
    ),
    "relative-factor": (
        "reproduced",
        "有的如此：DeBERTa 用 1/sqrt(3 d_k)，T5 不缩放；也有的仍用 1/sqrt(d_k)。",
    ),
    "batchnorm-form": (
        "corrected",
        "它除以的是假设给出的常数，批归一化除以的是测得的标准差：分量的标准差为 2 时，方差为 "
        "16 而不是 1。",
    ),
    "always-in-range": (
        "refuted",
        "只在开始时成立：常数跟不上学到的东西，训练后方差约为 10。",
    ),
    "temperature": ("reproduced", "成立；每行的温度还取决于查询的长度。"),
    "stop-learning": ("depends on the horizon", "会学，只是很慢；结论取决于步数。"),
    "unscaled-position": ("corrected", "集中在少数键上，但不偏向任何位置；位置偏好来自训练。"),
    "dk-independence": ("refuted", "宽度低于任务所需时不成立。"),
    "glorot-unit-var": ("corrected", "只有 d_k = d_model 时成立。"),
    "init-controls-variance": (
        "reproduced",
        "控制的是 q 与 k 的方差，不是它们点积的方差。",
    ),
    "sigma-law": ("corrected", "应为 dim sigma^4。"),
    "products-grow": (
        "reproduced",
        "绝对值按 d_k 的 1/2 次幂增大，均值仍为 0；相对于模长则缩小，随机方向趋于正交，这才是“"
        "维度灾难”。",
    ),
    "cosine-analogy": ("corrected", "两个模长之积约为 d_k，而不是 sqrt(d_k)。"),
    "fold-start": (
        "reproduced",
        "开始时成立：输出只差舍入误差。",
    ),
    "fold-step": (
        "corrected",
        "学习率不变时不成立：一步梯度下降使分数的变化增大到 sqrt(d_k) 倍，Adam 增大到 "
        "d_k^(1/4) 倍。",
    ),
    "expressiveness": (
        "corrected",
        "表达能力相同：不缩放而用 W^Q/sqrt(d_k)，得到的是同一个函数。改变的是训练的起点和 W^Q "
        "的速度。",
    ),
    "dot-no-params": ("reproduced", "点积本身不加参数；计入投影后两者几乎相同。"),
    "universal": ("reproduced", "transformers 库中九成以上的模型如此。"),
    "layer-norm": (
        "corrected",
        "作用不同：它给输入单位方差，q·k 的方差仍为 d_k。",
    ),
    "saturated-gradient": (
        "refuted",
        "梯度仍然回传，其范数是未饱和时的两到三倍。",
    ),
    "first-step": (
        "corrected",
        "取决于优化器：SGD 与 Muon 除以 sqrt(d_k)，Adam 除以 d_k，一步的改变才与 d_k 无关。",
    ),
    "unstable-training": (
        "depends on the horizon",
        "训练足够久后成立（就学习率的敏感度而言）：合适的学习率范围更窄；短训练时尚看不出。",
    ),
    "qk-norm": ("reproduced", "不仅能替代缩放，对学习率还更不敏感。"),
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
