"""Flags that people bring from other engines: each is taken, or refused with what stands for it."""

import re

import pytest

from actors.sampling_params import PARAMETERS
from cluster.cli import app as cli
from cluster.config import ServeArgs
from cluster.config.other_engines import OTHER_ENGINES, foreign_words
from cluster.config.setting import declared, flag_name


def _names(text: str) -> list[str]:
    return text.split()


VLLM = _names("""
model runner convert task tokenizer tokenizer-mode trust-remote-code dtype seed hf-config-path
allowed-local-media-path allowed-media-domains revision code-revision tokenizer-revision rope-scaling
rope-theta max-model-len quantization enforce-eager max-seq-len-to-capture max-logprobs
disable-sliding-window disable-cascade-attn skip-tokenizer-init served-model-name hf-token hf-overrides
logits-processor-pattern generation-config override-generation-config model-impl logits-processors
load-format download-dir attention-backend reasoning-parser reasoning-parser-plugin guided-decoding-backend
structured-outputs-config distributed-executor-backend pipeline-parallel-size master-addr master-port nnodes
node-rank tensor-parallel-size decode-context-parallel-size dcp-kv-cache-interleave-size
cp-kv-cache-interleave-size prefill-context-parallel-size data-parallel-size data-parallel-rank
data-parallel-start-rank data-parallel-size-local data-parallel-address data-parallel-rpc-port
data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb enable-expert-parallel
all2all-backend enable-dbo enable-eplb eplb-config expert-placement-strategy num-redundant-experts
disable-custom-all-reduce block-size gpu-memory-utilization kv-cache-memory-bytes swap-space kv-cache-dtype
num-gpu-blocks-override enable-prefix-caching prefix-caching-hash-algo cpu-offload-gb calculate-kv-scales
kv-offloading-size kv-offloading-backend limit-mm-per-prompt media-io-kwargs mm-processor-kwargs
mm-processor-cache-gb disable-mm-preprocessor-cache interleave-mm-strings skip-mm-profiling enable-lora
enable-lora-bias max-loras max-lora-rank lora-dtype max-cpu-loras fully-sharded-loras lora-modules
otlp-traces-endpoint disable-log-stats max-num-batched-tokens max-num-seqs max-num-partial-prefills
max-long-partial-prefills long-prefill-token-threshold scheduling-policy enable-chunked-prefill
no-enable-chunked-prefill async-scheduling speculative-config kv-transfer-config ec-transfer-config
compilation-config cudagraph-capture-sizes max-cudagraph-capture-size optimization-level enable-log-requests
disable-log-requests enable-log-outputs headless api-server-count host port uds uvicorn-log-level
disable-uvicorn-access-log allow-credentials allowed-origins allowed-methods allowed-headers api-key
chat-template chat-template-content-format ssl-keyfile ssl-certfile ssl-ca-certs root-path
enable-auto-tool-choice tool-call-parser tool-parser-plugin log-config-file max-log-len
enable-prompt-tokens-details preemption-mode speculative-model
""")
"""Of `vllm serve`: https://docs.vllm.ai/en/latest/cli/serve.html, and common ones of older versions."""

VLLM_SHORT = _names("""
-tp -pp -dcp -pcp -dp -dpn -dpr -dpl -dpa -dpp -dpb -q
""")

SGLANG = _names("""
model-path tokenizer-path tokenizer-mode skip-tokenizer-init load-format trust-remote-code context-length
is-embedding enable-multimodal revision model-impl host port skip-server-warmup warmups nccl-port dtype
quantization quantization-param-path kv-cache-dtype mem-fraction-static max-running-requests
max-total-tokens chunked-prefill-size max-prefill-tokens schedule-policy enable-priority-scheduling
page-size device tp-size pp-size random-seed watchdog-timeout dist-timeout download-dir base-gpu-id
gpu-id-step log-level log-level-http log-requests log-requests-level show-time-cost enable-metrics api-key
served-model-name chat-template enable-cache-report reasoning-parser tool-call-parser sampling-defaults
dp-size load-balance-method dist-init-addr nnodes node-rank json-model-override-args
preferred-sampling-params enable-lora lora-paths max-loras-per-batch lora-backend attention-backend
prefill-attention-backend decode-attention-backend sampling-backend grammar-backend mm-attention-backend
speculative-algorithm speculative-algo speculative-draft-model-path speculative-num-steps
speculative-eagle-topk speculative-num-draft-tokens ep-size moe-a2a-backend moe-runner-backend deepep-mode
ep-num-redundant-experts init-expert-location enable-eplb enable-hierarchical-cache hicache-ratio
cpu-offload-gb disable-radix-cache cuda-graph-max-bs cuda-graph-bs disable-cuda-graph
disable-cuda-graph-padding enable-nccl-nvls enable-symm-mem disable-custom-all-reduce enable-mscclpp
disable-overlap-schedule enable-mixed-chunk enable-dp-attention enable-dp-lm-head enable-two-batch-overlap
enable-torch-compile torch-compile-max-bs allow-auto-truncate enable-custom-logit-processor
enable-flashinfer-allreduce-fusion disable-shared-experts-fusion disable-chunked-prefix-cache
enable-return-hidden-states enable-deterministic-inference disaggregation-mode
disaggregation-transfer-backend
""")
"""Of `python -m sglang.launch_server`: https://docs.sglang.ai/advanced_features/server_arguments.html."""

_SETTINGS = declared(ServeArgs)
_OWN = {setting.flag for setting in _SETTINGS.values()} | {s.short for s in _SETTINGS.values() if s.short}


@pytest.mark.slow
@pytest.mark.parametrize("flag", sorted({*VLLM_SHORT, *(f"--{name}" for name in (*VLLM, *SGLANG))}))
def test_each_is_taken_or_told_what_stands_for_it(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    if flag in _OWN:
        return
    name = flag.lstrip("-").replace("-", "_")
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", flag])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(f"latentray: there is no {name}: "), told


def test_words_name_flags_that_exist_and_no_flag_of_ours_is_foreign() -> None:
    switches = {f"--no-{setting.key}" for setting in _SETTINGS.values() if setting.is_switch}
    names = {flag.lstrip("-").replace("-", "_") for flag in (*VLLM_SHORT, *VLLM, *SGLANG)}
    for name in names | OTHER_ENGINES.keys():
        words = foreign_words(name) or ""
        assert set(re.findall(r"--[a-z-]+", words)) <= _OWN | switches | {"--executor"}
    for name in (*_SETTINGS, *PARAMETERS):
        assert foreign_words(name) is None, flag_name(name)
