"""Command lines of Megatron, in the style of public scripts, become configs."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import FLAGS, HEAD, flags_table
from tests.support.programs import programs
from tokamake.checkpoint.from_megatron_args import flag_table, from_megatron_args, read_flags
from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.config.root import Config
from tokamake.config_files import read_yaml
from tokamake.errors import UserError

GPT2 = """
python -m torch.distributed.launch --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \\
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 \\
    --global-batch-size 8 --seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 \\
    --lr-decay-iters 320000 --save ckpt --load ckpt --data-path my-gpt2_text_document \\
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 949,50,1 \\
    --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 \\
    --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --checkpoint-activations \\
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16 \\
    2>&1 | tee log.txt
"""
GPT3 = """
torchrun --nnodes=128 --nproc-per-node=8 pretrain_gpt.py --tensor-model-parallel-size 8
 --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel
 --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536
 --rampup-batch-size 16 16 5859375 --train-samples 146484375 --lr-decay-samples 126953125
 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --clip-grad 1.0
 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --bf16
 --data-path 0.7 web_text_document 0.3 books_text_document --split 98,2,0
 --use-distributed-optimizer --recompute-activations --hidden-dropout 0 --attention-dropout 0
"""
LLAMA = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096
 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096
 --max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm --swiglu
 --untie-embeddings-and-output-weights --disable-bias-linear --group-query-attention
 --num-query-groups 8 --norm-epsilon 1e-5 --tokenizer-type Llama2Tokenizer
 --tokenizer-model tokenizer.model --load llama2-7b --finetune --no-load-optim --bf16
 --micro-batch-size 1 --global-batch-size=128 --lr 1e-5 --lr-decay-style constant
 --lr-warmup-iters 5 --train-iters 100 --attention-dropout 0.0 --hidden-dropout 0.0
 --data-path a_text_document b_text_document --transformer-impl transformer_engine
"""
BERT = """
torchrun pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16
 --micro-batch-size 4 --global-batch-size 32 --seq-length 512 --max-position-embeddings 512
 --train-iters 1000000 --lr 0.0001 --lr-warmup-fraction .01 --lr-decay-iters 990000
 --lr-decay-style linear --min-lr 1e-5 --weight-decay 1e-2 --fp16 --loss-scale 1024
 --vocab-file bert-vocab.txt --data-path wiki_text_sentence --tokenizer-type BertWordPieceLowerCase
"""
T5 = """
pretrain_t5.py --encoder-num-layers 12 --decoder-num-layers 6 --hidden-size 768
 --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512
 --decoder-seq-length 128 --max-position-embeddings 512 --micro-batch-size 16
 --global-batch-size 128 --lr 0.0001 --train-iters 100000 --vocab-file bert-vocab.txt
 --vocab-extra-ids 100 --data-path wiki_text_sentence --bf16
"""
ICT = """
python pretrain_ict.py --num-layers 12 --hidden-size 768 --num-attention-heads 12
 --tensor-model-parallel-size 1 --micro-batch-size 32 --seq-length 256 --max-position-embeddings 512
 --train-iters 100000 --vocab-file bert-vocab.txt --tokenizer-type BertWordPieceLowerCase
 --DDP-impl torch --bert-load bert --log-interval 100 --retriever-report-topk-accuracies 20
 --retriever-score-scaling --load ict --save ict --data-path wiki_text_sentence
 --titles-data-path wiki_title_document --lr 0.0001 --lr-decay-style linear --weight-decay 1e-2
 --clip-grad 1.0 --lr-warmup-fraction 0.01 --query-in-block-prob 0.2 --fp16
 --biencoder-projection-dim 128 --biencoder-shared-query-context-model --ict-head-size 128
"""
AURORA = """
mpiexec -n 24 --ppn 12 python3 -Wignore pretrain_gpt_alcf.py --use-flash-attn-builder
 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --no-pipeline-parallel
 --deepspeed --deepspeed_config ds.json --zero-stage=1 --num-layers 32 --hidden-size 4096
 --num-attention-heads 32 --num-key-value-heads 8 --ffn-hidden-size 11008 --seq-length 4096
 --max-position-embeddings 65536 --use-rotary-position-embeddings --rope-theta 50000
 --swiglu --normalization rmsnorm --disable-bias-linear --no-query-key-layer-scaling
 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
 --data-file-list lists/dolma.txt --tokenizer-type Llama2Tokenizer --tokenizer-model tok/t.model
 --train-iters 1271565 --train-tokens 4673780159710 --lr 0.0003 --lr-decay-style cosine
 --lr-warmup-fraction 0.05 --optimizer adamw --adam-beta1=0.9 --adam-beta2=0.95 --adam-eps=0.00001
 --blend-sample-in-corpus --train-range-to-skip 100 120 --timing-log-level 1
"""
MIXTRAL = """
torchrun --nproc_per_node 8 pretrain_gpt.py --use-mcore-models --disable-bias-linear
 --seq-length 4096
 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0
 --normalization RMSNorm --position-embedding-type rope --swiglu --rotary-base 1000000
 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8
 --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-grouped-gemm
 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8
 --tensor-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4
 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --bf16
 --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path a_text_document
"""
DEEPSEEK_V3 = """
torchrun --nproc_per_node 8 pretrain_gpt.py --use-mcore-models --disable-bias-linear
 --seq-length 4096 --max-position-embeddings 163840 --num-layers 61 --hidden-size 7168
 --ffn-hidden-size 18432 --num-attention-heads 128 --normalization RMSNorm --norm-epsilon 1e-6
 --position-embedding-type rope --swiglu --rotary-base 10000 --untie-embeddings-and-output-weights
 --multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0
 --mscale-all-dim 1.0 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
 --num-experts 256 --moe-router-topk 8 --moe-layer-freq ([0]*3+[1]*58)
 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 100 --bf16
 --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --data-path a_text_document
"""
LINES = {
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3.replace("([0]", "'([0]").replace("58)", "58)'"),
    "gpt2": GPT2,
    "gpt3": GPT3,
    "llama": LLAMA,
    "bert": BERT,
    "t5": T5,
    "ict": ICT,
    "aurora": AURORA,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 384}
    settings = {**sizes, "bf16": {"enabled": True}, "zero_optimization": {"reduce_bucket_size": 5}}
    Path("ds.json").write_text(json.dumps(settings))
    return tmp_path


def converted(line: str) -> tuple[Config, Architecture, list[str]]:
    """Config, architecture and comments."""
    from_megatron_args([line], output=Path("my.yaml"))
    config = Config.model_validate(read_yaml(Path("my.yaml"), ""))
    comments = [row for row in Path("my.yaml").read_text().splitlines() if row.startswith("#")]
    return config, read_architecture(Path("my.model.yaml")), comments


EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "mixtral": (
        {
            "train.router.balance_coefficient": 0.01,
            "train.router.z_coefficient": 0.001,
            "train.parallel.expert_parallel_size": 8,
        },
        {
            "family": "mixtral",
            "intermediate_size": 14336,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        ["--moe-grouped-gemm", "--moe-token-dispatcher-type"],
    ),
    "deepseek_v3": (
        {"train.mtp.loss_scaling_factor": 0.1},
        {
            "family": "deepseek_v3",
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "q_lora_rank": 1536,
            "v_head_dim": 128,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
        },
        [],
    ),
    "gpt2": (
        {
            "train.schedule.warmup_steps": 3200,
            "train.schedule.decay_steps": 320_000,
            "train.recompute_granularity": "full",
            "train.loss_scaling.hysteresis": 2,
            "train.dropout.hidden": 0.1,
            "train.precision": "fp16",
            "model.checkpoint": None,
        },
        {"family": "gpt", "intermediate_size": 4096, "hidden_act": "gelu_new"},
        ["--merge-file", "--data-impl", "--distributed-backend", "--save"],
    ),
    "gpt3": (
        {
            "train.rampup_batch_size": (16, 16, 5859375),
            "train.train_samples": 146_484_375,
            "train.schedule.decay_samples": 126_953_125,
            "train.parallel.virtual_pipeline_size": 3,
            "train.parallel.pipeline_schedule": "interleaved_1f1b",
            "train.recompute_granularity": "selective",
            "train.optimizer.beta2": 0.95,
            "train.split": "98,2,0",
        },
        {"num_hidden_layers": 96, "initializer_range": 0.006},
        [],
    ),
    "llama": (
        {
            "train.schedule.name": "constant",
            "train.schedule.min_learning_rate": None,
            "model.checkpoint": Path("llama2-7b"),
            "train.finetune": True,
            "train.load_optimizer": True,
            "train.global_batch_size": 128,
        },
        {"family": "llama", "num_key_value_heads": 8, "attention_bias": False},
        ["--tokenizer-type", "--transformer-impl", "--no-load-optim"],
    ),
    "bert": (
        {
            "train.objective": "masked",
            "train.loss_scaling.static": True,
            "train.loss_scaling.initial_scale": 1024,
            "train.schedule.warmup_steps": 9900,
            "tokenize.split_sentences": True,
        },
        {"family": "bert", "head_act": "gelu"},
        ["--tokenizer-type"],
    ),
    "t5": (
        {
            "train.objective": "span_corruption",
            "train.masking.decoder_sequence_length": 128,
            "tokenizer.sentinels": 100,
            "train.schedule.name": "linear",
        },
        {"family": "t5", "num_hidden_layers": 12, "num_decoder_layers": 6},
        [],
    ),
    "ict": (
        {
            "train.objective": "ict",
            "train.ict.topk": (20,),
            "train.ict.score_scaling": True,
            "train.ict.query_in_block_probability": 0.2,
            "model.checkpoint": Path("bert"),
            "train.finetune": True,
        },
        {"family": "biencoder", "shared_towers": True, "projection_dim": 128},
        ["--titles-data-path", "--ict-head-size"],
    ),
    "aurora": (
        {
            "train.train_steps": 1_271_565,
            "train.train_tokens": None,
            "train.micro_batch_size": 2,
            "train.global_batch_size": 384,
            "train.precision": "bf16",
            "train.schedule.warmup_steps": 63_578,
            "train.optimizer.epsilon": 1e-5,
            "train.zero_stage": 1,
            "weights": Path("lists/dolma.txt"),
        },
        {"family": "llama", "num_key_value_heads": 8, "rope_theta": 50000},
        ["--train-range-to-skip", "--timing-log-level", "--blend-sample-in-corpus"],
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_public_command_lines_become_configs(name: str) -> None:
    config, architecture, comments = converted(LINES[name])
    settings, fields, left_out = EXPECTED[name]
    for path, value in settings.items():
        found: Any = config
        for key in path.split("."):
            found = getattr(found, key)
        assert (path, found) == (path, value)
    assert {key: getattr(architecture, key) for key in fields} == fields
    assert "](" not in "".join(comments)  # a link of the guide leads nowhere in a config
    flags = [comment.split()[1].rstrip(":") for comment in comments[1:]]
    assert {*left_out} <= {*flags}
    carried = {"--data-path", "--lr-warmup-fraction", "--num-layers-per-virtual-pipeline-stage"}
    assert not carried & {*flags}


def test_routers_have_no_loss_by_megatrons_default() -> None:
    plain = re.sub(r"--moe-(aux|z)-loss-coeff \S+", "", MIXTRAL)
    assert converted(plain)[0].train.router.balance_coefficient == 0
    unbalanced = MIXTRAL.replace(" aux_loss\n", " none\n")
    assert converted(unbalanced)[0].train.router.balance_coefficient == 0
    _, _, comments = converted(f"{GPT2.partition('2>&1')[0]} --moe-aux-loss-coeff 0.1")
    assert "# --moe-aux-loss-coeff 0.1: without effect beside the other settings" in comments


def test_datasets_are_listed_with_their_weights() -> None:
    converted(GPT3)
    listed = Path("my.weights.txt").read_text()
    assert listed == "0.7 web_text_document\n0.3 books_text_document\n"
    converted(LLAMA)
    assert Path("my.weights.txt").read_text() == "1 a_text_document\n1 b_text_document\n"
    converted(GPT2)
    assert Path("my.weights.txt").read_text() == "1 my-gpt2_text_document\n"


def test_a_list_in_another_folder_names_the_same_datasets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("conf").mkdir()
    line = GPT2.replace("my-gpt2_text_document", "1 my-gpt2_text_document 2 /data/b")
    from_megatron_args([line], output=Path("conf/my.yaml"))
    assert Path("conf/my.weights.txt").read_text() == "1 ../my-gpt2_text_document\n2 /data/b\n"
    printed = capsys.readouterr().out
    assert re.fullmatch(
        r"conf/my\.yaml: \d+ flags not carried over; see its first lines\n", printed
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pretrain_gpt.py --lr $LR --num-layers 2", r"^\$LR: a variable of the shell; write"),
        ("pretrain_gpt.py ${ARGS[@]}", r"^\$\{ARGS: a variable of the shell"),
        ("pretrain_gpt.py --lr 'x", "^command line: No closing quotation; quote it"),
        ("pretrain_gpt.py 24 --lr 1", "^24: no file, and no flag of Megatron; begin with"),
        ("lost.txt", "^lost.txt: no file, and no flag of Megatron"),
        ("--num-layers 2 --bf16 --fp16", "--bf16 and --fp16: both are given"),
        ("pretrain_gpt.py", "^command line: has no flags"),
        ("--lr 1e-4", "^--num-layers: missing: not a number; give one"),
        (f"{T5} --num-layers many", "^--num-layers: many: not a number"),
        (f"{GPT2} --lr".replace("2>&1 | tee log.txt", ""), "^--lr: has no value; add it"),
        (f"--num-experts 8 {GPT3[GPT3.index('.py') + 3 :]}", "flags: args.num_experts: 8: means"),
        (f"--optimizer galore {GPT3[GPT3.index('.py') + 3 :]}", "galore"),
        ("x.py --num-layers 2 --deepspeed_config none.json", "none.json: no such file; give Deep"),
        (f"{T5} --lr high", "train.optimizer.learning_rate: 'high'"),
    ],
)
def test_mistakes_are_named(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        converted(line)
    assert not Path("my.yaml").exists()


def test_a_warmup_that_is_not_finite_is_not_carried_over() -> None:
    converted(f"{T5} --lr-warmup-fraction nan")
    assert "# --lr-warmup-fraction nan: a share of" in Path("my.yaml").read_text()


def test_a_file_words_and_a_quoted_text_are_the_same(folder: Path) -> None:
    (folder / "train.sh").write_text(f"#!/bin/sh\n# GPT-2\n{GPT2}")
    expected = read_flags([GPT2])
    assert read_flags(["train.sh"]) == expected
    words = GPT2.replace("\\\n", " ").split()
    assert read_flags(words) == expected
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length=64 --lr 1e-3"
    written = []
    for arguments in ([flags], ["--", *flags.split()], [flags, "--output", "-"]):
        done = subprocess.run(
            [programs("tokamake") / "tokamake", "from-megatron-args", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        is_printed = arguments[-1] == "-"
        written.append(done.stdout if is_printed else Path("megatron.yaml").read_text())
    assert written[0] == written[1] == written[2]
    assert yaml.safe_load(written[0])["train"]["sequence_length"] == 64


def test_the_last_of_several_flags_counts_and_a_dynamic_scale_stays() -> None:
    line = f"{BERT} --lr 1 --lr 0.5 --loss-scale 0".replace("--loss-scale 1024", "")
    train = converted(line)[0].train
    assert train.optimizer.learning_rate == 0.5
    assert (train.loss_scaling.static, train.loss_scaling.initial_scale) == (False, 2**32)


def test_the_guide_has_the_table_of_flags() -> None:
    page = FLAGS.read_text(encoding="utf-8")
    assert page == page.split(HEAD)[0] + flags_table(), "run `make docs`"
    flags = [flag for names, *_ in flag_table() for flag in names.split()]
    assert len(flags) == len({*flags})
    asked = """DDP-impl num-layers-per-virtual-pipeline-stage lr-decay-samples use-flash-attn
        dataset-impl num-workers distributed-backend exit-interval init-method-std lazy-loader
        no-bias-gelu-fusion embedding-weights-in-fp32 train-range-to-skip kill-switch-file
        checkpoint-activations strict-lambada target-tensor-parallel-size"""
    assert {*asked.split()} <= {*flags}
    for _, targets, _, remark in flag_table():
        assert targets or remark
        for target in targets.split():
            assert re.fullmatch(r"[\w.]+(\[\])?(=\w+)?(\|[\w.-]+:\w+)*", target)
