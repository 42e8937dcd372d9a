"""The examples run as scripts, and the document's snippets run as they are written there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from monitor_models import files, hooks_of

import tensortap as tap

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Import a module of examples/ afresh."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


SAVED = {
    "monitor_callbacks": [
        "attention_analysis_epoch_1.pt",
        "attention_analysis_epoch_5.pt",
        "epoch_cross_attention_epoch1.pt",
        "epoch_cross_attention_epoch5.pt",
        "epoch_stats_cross_attention_epoch_1.pt",
        "epoch_stats_cross_attention_epoch_5.pt",
        *(f"single_attention_weights_epoch{e}_batch{b}.pt" for e in (1, 5) for b in (0, 1)),
    ],
    "monitor_wrapper": [
        "epoch_ffn_epoch_stats_epoch1.pt",
        "epoch_ffn_epoch_stats_epoch5.pt",
        *(f"single_attention_weights_epoch{e}_batch{b}.pt" for e in (1, 5) for b in (0, 2)),
    ],
    "monitor_direct": [
        "attention_analysis_epoch_1.pt",
        "attention_analysis_epoch_3.pt",
        *(
            f"custom_transformer.encoder.layers.{n}.ffn_epoch_{e}.pt"
            for n in (0, 1)
            for e in (1, 3)
        ),
        *(f"epoch_transformer.encoder.layers.{n}.ffn_epoch{e}.pt" for n in (0, 1) for e in (1, 3)),
        *(f"single_attention_epoch{e}_batch{b}.pt" for e in (1, 3) for b in (0, 1)),
    ],
}


@pytest.mark.parametrize("name", SAVED)
def test_each_way_of_use(example, tmp_path, name) -> None:
    losses = example(name).main(str(tmp_path / "out"))
    assert losses[-1] < losses[0]
    assert files(tmp_path / "out") == SAVED[name]
    for path in (tmp_path / "out").glob("*.pt"):
        torch.load(path, weights_only=True)
    run = tap.open(tmp_path / "out")
    assert run.manifest.status == "complete" and not run.manifest.notes
    assert {row.epoch for layer in run.layers for row in run[layer].records} == (
        {1, 3} if name == "monitor_direct" else {1, 5}
    )


def test_the_examples_run_as_scripts(tmp_path) -> None:
    source = str(Path(tap.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "monitor_direct.py"), str(tmp_path / "here")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("losses: [") and done.stderr == ""
    assert len(files(tmp_path / "here")) == 14


def test_what_the_example_saves_is_what_the_layers_gave(example, tmp_path) -> None:
    example("monitor_wrapper").main(str(tmp_path / "out"))
    item = torch.load(
        tmp_path / "out" / "single_attention_weights_epoch5_batch2.pt", weights_only=True
    )
    attn_output, attn_weights = item["output"]
    assert attn_output.shape == (16, 8, 32) and attn_weights.shape == (16, 8, 8)
    torch.testing.assert_close(attn_weights.sum(-1), torch.ones(16, 8))
    whole = torch.load(tmp_path / "out" / "epoch_ffn_epoch_stats_epoch1.pt", weights_only=True)
    assert whole["output"].shape == (64, 8, 32) and whole["batch_idx"] == [0, 1, 2, 3]


def test_the_configurations_say_the_same(example, tmp_path) -> None:
    from tensortap.monitoring.config import read_config

    assert read_config(EXAMPLES / "config.json") == read_config(EXAMPLES / "config.toml")
    model = example("small_transformer").SmallTransformer()
    monitor = tap.Monitor.from_config(model, EXAMPLES / "config.toml", output_dir=tmp_path)
    assert monitor.epochs_to_record == [1, 5, 10, 20] and monitor.batch_indices == [0, 1]
    monitor.remove_hooks()


def test_plots_take_weights_of_any_leading_shape(example, tmp_path) -> None:
    analysis = example("analysis")
    for shape in ((5, 5), (2, 5, 5), (2, 3, 5, 5)):
        figure = analysis.plot_attention_patterns(torch.rand(shape), tmp_path / "a.png")
        (image,) = figure.axes[0].images
        assert image.get_array().shape == (5, 5)
    assert (tmp_path / "a.png").stat().st_size > 1000
    found = analysis.process_attention_outputs([torch.rand(2, 3, 5, 5)] * 4)
    assert found["head_importance"].shape == (3,) and found["layer_patterns"].shape == (2, 5, 5)


# The document's snippets, as they stand there. Only imports and `...` are filled in.

CALLBACKS = """
def encapsulated_train(config, device, **kwargs):
    # 获取回调函数
    epoch_callback = kwargs.get('epoch_callback')
    batch_callback = kwargs.get('batch_callback')
    
    for epoch in range(1, config.train.num_epochs + 1):
        if epoch_callback:
            epoch_callback(epoch)  # 设置当前epoch
        
        for batch_idx, batch in enumerate(dataloader):
            if batch_callback:
                batch_callback(batch_idx)  # 设置当前batch
            
            # 训练逻辑...
            train_step(batch)
        
        # epoch结束处理
        if hasattr(config, 'monitor') and config.monitor:
            single_data = config.monitor.get_single_data()
            epoch_data = config.monitor.get_epoch_data()
            # 自定义处理...
            config.monitor.save_single_outputs()
            config.monitor.save_epoch_outputs()
            config.monitor.clear_current_epoch_data()
    
    # 训练结束
    if hasattr(config, 'monitor') and config.monitor:
        config.monitor.remove_hooks()
"""

FIRST = (
    CALLBACKS
    + """
epoch_callback = monitor.create_epoch_callback()
batch_callback = monitor.create_batch_callback()

# 调用封装的训练函数
encapsulated_train(config, device, 
                  epoch_callback=epoch_callback, 
                  batch_callback=batch_callback)
"""
)

SECOND = (
    CALLBACKS
    + """
from tensortap import MonitoredTrainer

trainer = MonitoredTrainer(monitor)
monitored_train = trainer.wrap_training_function(encapsulated_train)
monitored_train(config, device)
"""
)

THIRD = """
for epoch in range(1, num_epochs + 1):
    monitor.set_epoch(epoch)
    
    for batch_idx in range(num_batches):
        monitor.set_batch_idx(batch_idx)
        # 调用封装的单batch训练函数
        encapsulated_train_one_batch(batch_idx)
    
    # epoch结束处理
    single_data = monitor.get_single_data()
    epoch_data = monitor.get_epoch_data()
    # 自定义处理...
    monitor.save_single_outputs()
    monitor.save_epoch_outputs()
    monitor.clear_current_epoch_data()

monitor.remove_hooks()  # 训练结束清理
"""

PLAIN = """
try:
    for epoch in range(1, num_epochs + 1):
        monitor.set_epoch(epoch)
        
        for batch_idx, batch in enumerate(dataloader):
            monitor.set_batch_idx(batch_idx)
            
            # 正常的训练代码
            train_step(batch)
        
        # epoch结束：处理Monitor数据
        single_data = monitor.get_single_data()
        epoch_data = monitor.get_epoch_data()
        
        # 自定义处理逻辑
        for alias, layer_info in single_data.items():
            outputs = list(layer_info['data'].values())
            # 计算平均值或其他统计
            avg_output = torch.mean(torch.stack(outputs), dim=0)
            torch.save(avg_output, f'custom_avg_{alias}_epoch_{epoch}.pt')
        
        for alias, layer_info in epoch_data.items():
            outputs = list(layer_info['data'].values())
            # 对整个epoch的数据进行处理
            all_outputs = torch.cat(outputs, dim=0)
            epoch_stats = compute_statistics(all_outputs)
            torch.save(epoch_stats, f'epoch_stats_{alias}_epoch_{epoch}.pt')
        
        # 保存原始数据
        monitor.save_single_outputs()
        monitor.save_epoch_outputs()
        
        # 清理内存
        monitor.clear_current_epoch_data()

finally:
    # 确保清理hooks
    monitor.remove_hooks()
"""

TUPLES = """
# 对于tuple输出，output_shape为列表，output为tuple
single_data = monitor.get_single_data()
for alias, layer_info in single_data.items():
    outputs = list(layer_info['data'].values())
    for output in outputs:
        if isinstance(output, tuple):
            attn_output, attn_weights = output
            # 处理注意力输出和权重
            print(f"Attention output shape: {attn_output.shape}")
            print(f"Attention weights shape: {attn_weights.shape}")
"""

ATTENTION = """
# 获取single数据
single_data = monitor.get_single_data()
for alias, layer_info in single_data.items():
    if 'attention' in alias:
        # 获取所有输出
        outputs = list(layer_info['data'].values())  # list of outputs
        # 计算注意力权重的平均值
        attention_weights = outputs  # 已经是list
        avg_attention = torch.mean(torch.stack(attention_weights), dim=0)
        
        # 可视化注意力模式
        plot_attention_patterns(avg_attention)
        torch.save(avg_attention, f'attention_analysis_epoch_{epoch}.pt')
"""

FFN = """
# 获取epoch数据
epoch_data = monitor.get_epoch_data()
for alias, layer_info in epoch_data.items():
    if 'ffn' in alias:
        # 获取所有输出
        outputs = list(layer_info['data'].values())
        # 拼接所有batch的输出
        all_outputs = torch.cat(outputs, dim=0)
        
        # 计算统计信息
        stats = {
            'mean': torch.mean(all_outputs, dim=0),
            'std': torch.std(all_outputs, dim=0),
            'min': torch.min(all_outputs, dim=0)[0],
            'max': torch.max(all_outputs, dim=0)[0]
        }
        
        torch.save(stats, f'ffn_stats_epoch_{epoch}.pt')
"""

CUSTOM = """
def process_attention_outputs(outputs):
    '''自定义注意力输出处理'''
    weights = torch.stack(outputs)
    
    # 计算头部重要性
    head_importance = torch.mean(weights, dim=[0, 2])  # [num_heads]
    
    # 计算层间注意力模式
    layer_patterns = torch.mean(weights, dim=1)  # [batch_size, seq_len, seq_len]
    
    return {
        'head_importance': head_importance,
        'layer_patterns': layer_patterns
    }

# 在训练循环中使用
single_data = monitor.get_single_data()
for alias, layer_info in single_data.items():
    if 'attention' in alias:
        outputs = list(layer_info['data'].values())
        analysis = process_attention_outputs(outputs)
        torch.save(analysis, f'attention_analysis_{alias}_epoch_{epoch}.pt')
"""

EXTENSION = """
buffers = monitor.get_epoch_buffers()
for layer, outputs in buffers.items():
    # 自定义拼接、统计、可视化等
    processed = my_custom_function(outputs)
    monitor.save_custom_output(processed, f'custom_{layer}.pt')
monitor.clear_epoch_data()
"""


def surroundings(example, tmp_path, monkeypatch, leaf):
    """What the snippets expect around them."""
    monkeypatch.chdir(tmp_path)
    parts, analysis = example("small_transformer"), example("analysis")
    model, loader, optimizer = parts.make_training()
    layers_to_monitor = {
        "transformer.encoder.layers.0.self_attn": {
            "alias": "attention_weights",
            "record_type": "single",
        },
        "transformer.encoder.layers.0.ffn": {
            "alias": "ffn_epoch_stats",
            "record_type": "epoch_full",
        },
    }
    if leaf is not None:
        layers_to_monitor["transformer.encoder.layers.0.self_attn"]["leaf"] = leaf
    monitor = tap.Monitor(
        model=model,
        layers_to_monitor=layers_to_monitor,
        epochs_to_record=[1, 3],
        output_dir="out",
        batch_indices=[0, 2],
    )

    def train_step(batch) -> None:
        loss = parts.loss_of(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    data = list(loader)
    return {
        "torch": torch,
        "monitor": monitor,
        "model": model,
        "dataloader": loader,
        "train_step": train_step,
        "encapsulated_train_one_batch": lambda batch_idx: train_step(data[batch_idx]),
        "num_epochs": 3,
        "num_batches": len(data),
        "device": "cpu",
        "config": types.SimpleNamespace(train=types.SimpleNamespace(num_epochs=3), monitor=monitor),
        "compute_statistics": analysis.compute_statistics,
        "plot_attention_patterns": analysis.plot_attention_patterns,
        "my_custom_function": lambda outputs: torch.cat(outputs).mean(0),
    }


WAYS = [
    f"epoch_ffn_epoch_stats_epoch{e}.pt" for e in (1, 3)
] + [f"single_attention_weights_epoch{e}_batch{b}.pt" for e in (1, 3) for b in (0, 2)]  # fmt: skip


@pytest.mark.parametrize("code", [FIRST, SECOND, THIRD], ids=["callbacks", "wrapper", "direct"])
def test_the_documents_ways_of_use(example, tmp_path, monkeypatch, code) -> None:
    names = surroundings(example, tmp_path, monkeypatch, None)
    exec(code, names)
    assert files(tmp_path / "out") == WAYS
    assert hooks_of(names["model"]) == 0


def test_the_documents_plain_loop(example, tmp_path, monkeypatch) -> None:
    names = surroundings(example, tmp_path, monkeypatch, "[1]")
    exec(PLAIN, names)
    assert files(tmp_path / "out") == WAYS
    assert files(tmp_path) == [
        *(f"custom_avg_attention_weights_epoch_{epoch}.pt" for epoch in (1, 3)),
        *(f"epoch_stats_ffn_epoch_stats_epoch_{epoch}.pt" for epoch in (1, 3)),
    ]
    average = torch.load(tmp_path / "custom_avg_attention_weights_epoch_3.pt", weights_only=True)
    torch.testing.assert_close(average.sum(-1), torch.ones(16, 8))


def run_an_epoch(names) -> None:
    names["epoch"] = 1
    names["monitor"].set_epoch(1)
    for batch_idx, batch in enumerate(names["dataloader"]):
        names["monitor"].set_batch_idx(batch_idx)
        names["train_step"](batch)


def test_the_documents_tuples(example, tmp_path, monkeypatch, capsys) -> None:
    names = surroundings(example, tmp_path, monkeypatch, None)
    run_an_epoch(names)
    exec(TUPLES, names)
    assert (
        capsys.readouterr().out.splitlines()
        == [
            "Attention output shape: torch.Size([16, 8, 32])",
            "Attention weights shape: torch.Size([16, 8, 8])",
        ]
        * 2
    )
    names["monitor"].remove_hooks()


@pytest.mark.parametrize(
    ("code", "saved"),
    [
        (ATTENTION, "attention_analysis_epoch_1.pt"),
        (FFN, "ffn_stats_epoch_1.pt"),
        (CUSTOM, "attention_analysis_attention_weights_epoch_1.pt"),
        (EXTENSION, "out/custom_ffn_epoch_stats.pt"),
    ],
    ids=["attention", "ffn", "custom", "extension"],
)
def test_the_documents_processing(example, tmp_path, monkeypatch, code, saved) -> None:
    names = surroundings(example, tmp_path, monkeypatch, 1)
    run_an_epoch(names)
    exec(code, names)
    assert torch.load(tmp_path / saved, weights_only=True) is not None
    if code is EXTENSION:
        assert names["monitor"].get_epoch_data() == {} != names["monitor"].get_single_data()
    names["monitor"].remove_hooks()
