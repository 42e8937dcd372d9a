"""The commands and snippets of document 000, run as its reader would run them.

They stand here, and in minimax_reader.py, word for word. Every block runs in a copy of
recipes/minimax_m2, which is `minimax_m2_misc/`; `/home/ubuntu/` is that folder too. `python` is a
fork of a warm interpreter.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from minimax_reader import COMPILE, ON_GPU, RECIPE, ROOT, SKIP_COMPILE, WORKFLOW, Reader

pytest.importorskip("transformers")

LOAD_LAYER = r"""
import torch

# 加载某一层的输出
layer_0_output = torch.load('/home/ubuntu/traced_model/test_layers/full_model/layer_0_output.pt')

print(f"Shape: {layer_0_output.shape}")
print(f"Mean: {layer_0_output.float().mean()}")
print(f"Std: {layer_0_output.float().std()}")
"""

STATISTICS = r"""
import torch

# 加载元数据
metadata = torch.load('/home/ubuntu/traced_model/test_layers/full_model/metadata.pt')

# 查看所有层的统计
stats = metadata['statistics']

for layer_name, stat in sorted(stats.items()):
    if 'layer_' in layer_name:  # 只看decoder layers
        print(f"{layer_name}: Mean={stat['mean']:.6f}, Has NaN={stat['has_nan']}")
"""

ONE_LAYER = r"""
import torch

# 加载特定层的输出
layer_30 = torch.load('/home/ubuntu/traced_model/test_layers/full_model/layer_30_output.pt')

# 检查数值分布
print(f"Min: {layer_30.min()}")
print(f"Max: {layer_30.max()}")
print(f"Mean: {layer_30.float().mean()}")
print(f"Has NaN: {torch.isnan(layer_30).any()}")
print(f"Has Inf: {torch.isinf(layer_30).any()}")

# 检查特定位置的值
print(f"First token features (前5维): {layer_30[0, 0, :5]}")
"""

ADJACENT = r"""
import torch

# 加载相邻两层
layer_30 = torch.load('/home/ubuntu/traced_model/test_layers/full_model/layer_30_output.pt')
layer_31 = torch.load('/home/ubuntu/traced_model/test_layers/full_model/layer_31_output.pt')

# 计算差异
diff = (layer_31 - layer_30).abs()
print(f"Max diff: {diff.max()}")
print(f"Mean diff: {diff.mean()}")

# 如果差异太大，可能有问题
if diff.max() > 10.0:
    print("⚠️  警告：相邻层差异过大！")
"""

COMPARE_ONE = r"""
import torch

# 加载Neuron和GPU的同一层输出
neuron_layer_30 = torch.load('/home/ubuntu/traced_model/test_layers/full_model/layer_30_output.pt')
gpu_layer_30 = torch.load('/home/ubuntu/traced_model/gpu_reference/full_model/layer_30_output.pt')

# 计算差异
diff = (neuron_layer_30 - gpu_layer_30).abs()
relative_diff = diff / (gpu_layer_30.abs() + 1e-8)

print(f"绝对差异:")
print(f"  Max: {diff.max():.6f}")
print(f"  Mean: {diff.mean():.6f}")
print(f"  Median: {diff.median():.6f}")

print(f"\n相对差异:")
print(f"  Max: {relative_diff.max():.6f}")
print(f"  Mean: {relative_diff.mean():.6f}")

# 计算相似度
cosine_sim = torch.nn.functional.cosine_similarity(
    neuron_layer_30.flatten(),
    gpu_layer_30.flatten(),
    dim=0
)
print(f"\nCosine Similarity: {cosine_sim:.6f}")

# 良好范围：
# - Max abs diff < 0.01
# - Mean abs diff < 0.001
# - Cosine similarity > 0.99
"""

Q1 = r"""
import torch

metadata = torch.load('/home/ubuntu/traced_model/test_layers/full_model/metadata.pt')
stats = metadata['statistics']

# 检查每一层
problem_layers = []
for layer_name, stat in stats.items():
    if 'layer_' in layer_name:
        # 检查异常值
        if stat.get('has_nan', False) or stat.get('has_inf', False):
            problem_layers.append(layer_name)
            print(f"❌ {layer_name}: Has NaN={stat['has_nan']}, Has Inf={stat['has_inf']}")

        # 检查数值范围
        if abs(stat.get('mean', 0)) > 10.0:
            problem_layers.append(layer_name)
            print(f"⚠️  {layer_name}: Mean={stat['mean']:.6f} (异常大)")

if not problem_layers:
    print("✓ 所有层的输出看起来正常")
else:
    print(f"\n发现 {len(problem_layers)} 个有问题的层")
"""

Q2 = r"""
import torch

# 加载前后几层
prev_layer = torch.load(f'/home/ubuntu/traced_model/test_layers/full_model/layer_{N-1}_output.pt')
current_layer = torch.load(f'/home/ubuntu/traced_model/test_layers/full_model/layer_{N}_output.pt')
next_layer = torch.load(f'/home/ubuntu/traced_model/test_layers/full_model/layer_{N+1}_output.pt')

# 计算变化幅度
change_in = (current_layer - prev_layer).abs().mean()
change_out = (next_layer - current_layer).abs().mean()

print(f"Layer {N-1} -> {N}: {change_in:.6f}")
print(f"Layer {N} -> {N+1}: {change_out:.6f}")

# 如果变化异常大，检查该层的具体输出
print(f"\nLayer {N} 统计:")
print(f"  Mean: {current_layer.float().mean():.6f}")
print(f"  Std: {current_layer.float().std():.6f}")
print(f"  Min: {current_layer.min():.6f}")
print(f"  Max: {current_layer.max():.6f}")
"""

Q3 = r"""
import torch
import matplotlib.pyplot as plt

layer_30 = torch.load('/home/ubuntu/traced_model/test_layers/full_model/layer_30_output.pt')

# 展平并画直方图
values = layer_30.flatten().cpu().numpy()

plt.figure(figsize=(12, 4))

plt.subplot(1, 3, 1)
plt.hist(values, bins=100)
plt.title('Layer 30 Output Distribution')
plt.xlabel('Value')
plt.ylabel('Frequency')

plt.subplot(1, 3, 2)
plt.plot(values[:1000])
plt.title('First 1000 values')
plt.xlabel('Index')
plt.ylabel('Value')

plt.subplot(1, 3, 3)
plt.imshow(layer_30[0, :, :100].cpu().numpy(), aspect='auto', cmap='viridis')
plt.title('Layer 30 Output Heatmap (first 100 features)')
plt.xlabel('Feature dim')
plt.ylabel('Sequence position')
plt.colorbar()

plt.tight_layout()
plt.savefig('layer_30_analysis.png')
print("✓ 图表已保存到 layer_30_analysis.png")
"""


FILES = {
    *(f"layer_{index}_output.pt" for index in range(62)),
    "embedding_output.pt",
    "final_norm_output.pt",
    "metadata.pt",
}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_command_runs(minimax: Reader) -> None:
    for block, ran in minimax.document.items():
        assert ran.code == 0, f"{block}\n{ran.out}\n{ran.err}"
    written = (COMPILE + SKIP_COMPILE + ON_GPU + WORKFLOW).splitlines()
    ran_lines = "".join(minimax.document).splitlines()
    assert {line for line in written if not line.startswith("#")} <= set(ran_lines)


def test_the_commands_make_the_files_that_the_document_promises(minimax: Reader) -> None:
    traced = minimax.folder / "traced_model"
    for name in ("test_layers", "gpu_reference"):
        assert files(traced / name / "full_model") == FILES
    for name in ("layer_0", "layer_61", "embedding", "final_norm"):
        tensor = torch.load(traced / "test_layers" / "full_model" / f"{name}_output.pt")
        assert type(tensor) is torch.Tensor and tensor.shape == (1, 128, 32)
        assert tensor.device.type == "cpu"


def test_the_metadata_has_what_the_document_lists(minimax: Reader) -> None:
    tree = minimax.folder / "traced_model" / "test_layers" / "full_model"
    metadata = torch.load(tree / "metadata.pt")
    assert isinstance(metadata["prompt"], str) and metadata["prompt"].startswith("The weights")
    ids = metadata["input_ids"]
    assert ids.shape == (1, 128) and bytes((ids[0] - 3).tolist()).decode() == metadata["prompt"]
    assert metadata["config"]["num_hidden_layers"] == 62
    assert metadata["config"]["architectures"] == ["MiniMaxM2ForCausalLM"]
    assert set(metadata["statistics"]) == {
        name.removesuffix("_output.pt") for name in FILES - {"metadata.pt"}
    }
    for name, stat in metadata["statistics"].items():
        tensor = torch.load(tree / f"{name}_output.pt").double()
        assert stat["shape"] == list(tensor.shape)
        assert stat["mean"] == pytest.approx(float(tensor.mean()), abs=1e-9)
        assert stat["std"] == pytest.approx(float(tensor.std(correction=0)), rel=1e-9)
        assert (stat["min"], stat["max"]) == (float(tensor.min()), float(tensor.max()))
        assert stat["has_nan"] is False and stat["has_inf"] is False


LAYER = r"""  {}:
    Shape: \[1, 128, 32\]
    Mean: -?\d+\.\d{{6}}, Std: \d+\.\d{{6}}
    Range: \[-\d+\.\d{{6}}, \d+\.\d{{6}}\]
    Has NaN: False, Has Inf: False
"""


def test_the_screen_is_the_documents(minimax: Reader) -> None:
    (shown,) = (ran for block, ran in minimax.document.items() if block.endswith(SKIP_COMPILE))
    layers = ("embedding", "layer_0", "layer_30", "layer_61", "final_norm")
    assert re.fullmatch(
        "关键层统计信息:\n" + "\n".join(LAYER.format(name) for name in layers), shown.out
    )
    assert "Reusing" in shown.err and "Compiling" not in shown.err
    assert "note:" not in shown.err  # our own prompt fits


def test_the_whole_workflow_in_one_block(minimax: Reader) -> None:
    ran = minimax.document[WORKFLOW]
    assert "所有层统计摘要:" in ran.out
    assert (
        len(re.findall(r"^✓ layer_\d+ +Mean= *-?\d+\.\d{4} Std= *\d+\.\d{4}$", ran.out, re.M)) == 62
    )
    assert "Identical: all 62 compared layers have the same bits." in ran.out
    reports = minimax.folder / "comparison_reports"
    assert files(reports) == {
        "comparison.json", "comparison.html", "comparison.txt", "recordings"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("snippet", "said"),
    [
        (LOAD_LAYER, r"Shape: torch\.Size\(\[1, 128, 32\]\)\nMean: .*\nStd: .*\n"),
        (STATISTICS, r"(layer_\d+: Mean=-?\d+\.\d{6}, Has NaN=False\n){62}"),
        (
            ONE_LAYER,
            r"Min: -.*\nMax: .*\nMean: .*\nHas NaN: False\nHas Inf: False\nFirst token .*\n",
        ),
        (ADJACENT, r"Max diff: .*\nMean diff: .*\n"),  # and no warning
        (
            COMPARE_ONE,
            "绝对差异:\n  Max: 0.000000\n  Mean: 0.000000\n  Median: 0.000000\n\n相对差异:\n"
            "  Max: 0.000000\n  Mean: 0.000000\n\nCosine Similarity: 1.000000\n",
        ),
        (Q1, "✓ 所有层的输出看起来正常\n"),
        (
            f"N = 31\n{Q2}",
            r"Layer 30 -> 31: \d.*\nLayer 31 -> 32: \d.*\n\nLayer 31 统计:\n(  .*\n){4}",
        ),
        (Q3, "✓ 图表已保存到 layer_30_analysis.png\n"),
    ],
    ids=["load", "statistics", "one-layer", "adjacent", "compare", "Q1", "Q2", "Q3"],
)
def test_the_snippets_run_on_the_files(minimax: Reader, snippet: str, said: str) -> None:
    ran = minimax.python(snippet)
    assert ran.code == 0, ran.err
    assert re.fullmatch(said, ran.out), ran.out
    if snippet == Q3:
        assert (minimax.folder / "layer_30_analysis.png").read_bytes().startswith(b"\x89PNG")


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("page", [RECIPE / "README.md", ROOT / "docs" / "minimax-m2.md"], ids=str)
def test_the_commands_of_our_own_pages_run(minimax: Reader, page: Path) -> None:
    said = COMPILE + SKIP_COMPILE + ON_GPU
    done = ["cd recipes/minimax_m2", *said.replace("minimax_m2_misc/", "").splitlines()]
    for command in commands(page):
        if command in done:  # above, as the document's own
            continue
        ran = minimax.type(command)
        expected = re.search(r"# exit (\d)", command)
        assert ran.code == int(expected[1] if expected else 0), f"{command}\n{ran.out}{ran.err}"
        assert ran.out.strip()
