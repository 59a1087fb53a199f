"""Every mistake on the command line is one line on stderr, exit code 2, no folder, no run touched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_calls import SEEN, accept, call, mistake, set_up, snapshot, write_run

from torchrl_grpo.config.checks import whole as checks


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_up(tmp_path, monkeypatch)


# Mistakes: command line, what the message must name beside the key and value

BAD: list[tuple[str, str]] = [
    # unknown keys
    ("policy.kl_coeff=0.1", "write policy.kl_coef=0.1 instead"),
    ("lr=1e-5", "write optimizer.lr=1e-5 instead"),
    ("optimiser.lr=1e-5", "write optimizer.lr=1e-5 instead"),  # codespell:ignore optimiser
    ("env.batch_size=8", "no key env.batch_size"),
    ("env.num_envs.x=8", "no key env.num_envs.x"),
    ("mode=async", "no key mode"),
    ("train={epoch:2}", "epoch"),
    ("hydra.nothing=1", "nothing"),
    # stray prefixes
    ("+optimizer.lr=1", "write optimizer.lr=1 instead"),
    ("+optimizer.momentum=0.9", "no key optimizer.momentum"),
    ("++optimizer.momentum=0.9", "no key optimizer.momentum"),
    ("++env.extra.deep=1", "no key env.extra.deep"),
    ("+foo=1", "no key foo"),
    ("+env=gsm8k", "write env=gsm8k instead"),
    ("~optimizer.lr", "cannot be taken away"),
    ("~env", "cannot be taken away"),
    ("~reward.weights.closeness", "write reward.weights.closeness=0, for example"),
    # groups and names
    ("env=gsm9k", "write env=gsm8k instead"),
    ("env=nothing_like_it", "reasoning_gym"),
    ("env=null", "gsm8k"),
    ("policy=ppo", "grpo"),
    ("--config-name=grpo_gsm", "grpo_quickstart"),
    ("model.name=/nowhere", "model.name=/nowhere: there is no such folder; write a folder saved by"),
    ("model.name=.", "model.name=.: the folder holds no config.json"),
    ("--config-dir=nowhere", "no such folder"),
    ("--config-path=nowhere", "no such folder"),
    ("--no-such-option", "--help"),
    ("recipe=cpu", "write +recipe=cpu instead"),
    ("recipe=cp", "write +recipe=cpu instead"),
    ("method=grpo", "write train.method=grpo instead"),
    ("+recipe=nothing", "write +recipe= and one of cpu,"),
    (
        "env=my_env.py:shopping",
        "write env.environment=my_env.py:shopping for a class or env.dataset=",
    ),
    ("env=my_problems.jsonl", "write env=jsonl env.data_path=my_problems.jsonl"),
    ("train=x", "write for example train.method=VALUE instead, because train is a group of keys"),
    ("--cfg=nothing", "job"),
    # no override at all
    ("optimizer.lr", "write optimizer.lr=VALUE instead"),
    ("optimizer.lr=[1", "bracket"),
    ("optimizer.lr=1,2", "--multirun"),
    ("model=gpt2", "write model.name=gpt2 instead"),
    ("hub.push=mine", "write hub.push=ORG/NAME"),
    ("hub.private=false", "only read if hub.push is not null"),
    # types
    ("train.epochs=many", "a whole number"),
    ("train.epochs=1.5", "a whole number"),
    ("env.mixture={a:0.5,b:0.5}", "a list of mappings in square brackets"),
    ("train.epochs=true", "a whole number"),
    ("train.epochs=null", "a whole number"),
    ("optimizer.lr=fast", "a number"),
    ("eval.at_start=maybe", "true or false"),
    ("optimizer.betas=0.9", "a list of numbers"),
    ("optimizer.betas=[a,b]", "a list of numbers"),
    ("train_model.devices=0", "a list of whole numbers"),
    ("train_model.devices=[a]", "a list of whole numbers"),
    ("logging.backends=csv", "a list of names"),
    ("reward.weights=1", "a mapping"),
    ("reward.weights.format=much", "a number"),
    ("model.name={a:1}", "text"),
    # values
    ("seed=-1", "at least 0"),
    ("seed=4294967296", "at most"),
    ("env.dataset=gsm9k", "gsm8k, math, ifeval, reasoning_gym, jsonl"),
    ("env.answer_format=xml", "tags, plain, equation"),
    ("env.num_envs=0", "at least 1"),
    ("env.repeats=1", "a group of one has no advantage"),
    ("env.task_size=0", "at least 1"),
    ("env.prompt_template=Question:", "{question}"),
    ("env.data_path=missing.jsonl", "no such file or folder"),
    ("env.eval_data_path=/missing/test.jsonl", "no such file or folder"),
    ("env.data_path=", "no such file or folder"),
    ("model.name=", "must not be empty"),
    ("policy.surrogate=ppo", "clip, cispo, log_likelihood, sapo"),
    ("policy.surrogate_args.temperature=1", "clip has no options"),
    ("policy=sapo policy.surrogate_args.temperature=1", "temperature_positive, temperature_negative"),
    ("policy=sapo policy.surrogate_args.temperature_positive=0", "greater than 0"),
    ("policy.surrogate_args=1", "a mapping"),
    ("policy.dual_clip=1", "greater than 1"),
    ("policy.ratio=word", "token, sequence, trajectory"),
    ("policy.aggregation=mean", "token, sequence, constant"),
    ("policy.aggregation_length=0", "at least 1"),
    ("policy.advantage_estimator=gae", "group_mean, leave_one_out, reward, maxent"),
    ("policy.advantage_std=sample", "population, unbiased, batch, none"),
    ("policy.reward_combination=product", "together, apart"),
    ("policy.reward_clip=0", "greater than 0"),
    ("policy.reward_scale=inf", "finite"),
    ("policy.constant_groups=skip", "keep, drop, refill"),
    ("policy.max_refills=0", "at least 1"),
    ("policy.overlong=truncate", "keep, mask, penalise"),
    ("policy.overlong_buffer=0", "at least 1"),
    (
        "policy.overlong=penalise policy.overlong_buffer=257",
        "longer than a response, inference_model.max_new_tokens=256",
    ),
    ("policy.kl_target=0.1", "policy.init_kl_coeff=0.1"),
    ("policy.kl_coef=0.1 policy.kl_target=0", "greater than 0"),
    ("policy.init_kl_coeff=0.1", "write policy.kl_coef=0.1"),
    ("policy.kl_horizon=0", "at least 1"),
    ("policy.kl_coef=0.1 policy.kl_target=0.1 policy.kl_horizon=63", "64 responses"),
    ("policy.kl_inference_coef=-1", "at least 0"),
    ("policy.entropy_coef=-0.1", "at least 0"),
    ("policy.entropy_target=1 policy.entropy_coef=2", "policy.entropy_coef_max=1.0"),
    ("policy.entropy_target=0", "greater than 0"),
    ("policy.proximal=old", "engine, trainer"),
    ("policy.correction=truncate", "write policy.proximal=trainer policy.correction=truncate"),
    ("policy.correction=clip", "none, truncate, mask"),
    ("policy.correction_level=group", "token, sequence, trajectory"),
    ("policy.proximal=trainer policy.correction=truncate policy.correction_cap=0.5", "at least 1"),
    ("policy.proximal=trainer policy.correction=mask policy.correction_floor=3", "at most 1"),
    (
        "policy.proximal=trainer policy.correction=truncate policy.correction_floor=0.5",
        "write policy.proximal=trainer policy.correction=mask",
    ),
    (
        "policy=cispo policy.dual_clip=3",
        "only read if policy.surrogate is clip, and that is cispo, as policy=cispo sets it; write "
        "policy=grpo policy.surrogate=clip policy.dual_clip=3.0, or policy.dual_clip=null",
    ),
    ("policy=sapo policy.dual_clip=3", "and that is sapo, as policy=sapo sets it"),
    (
        "policy=maxent policy.kl_in=reward",
        "policy.advantage_estimator=maxent, as policy=maxent sets it, takes the reference into its weights; "
        "write policy.kl_in=weights, or policy=grpo policy.advantage_estimator=group_mean policy.kl_in=",
    ),
    (
        "policy=rloo policy.kl_coef=0.1 policy.kl_in=weights",
        "has such weights, and it is leave_one_out; write policy.kl_in=loss, or policy.advantage_estimator=",
    ),
    ("policy.surrogate_args.temperature_positive=2", "or policy.surrogate=sapo policy.surrogate_args.temp"),
    ("policy.reward_scale=0", "greater than 0"),
    ("policy.kl_coef=0.5 policy.kl_target=0.1 policy.init_kl_coeff=0.1", "one of the two"),
    ("policy.reward_combination=apart policy.kl_coef=0.1 policy.kl_in=reward", "policy.kl_in=loss"),
    ("policy.entropy_target=1 policy.entropy_coef_max=0", "greater than 0"),
    ("policy.entropy_target=1 policy.entropy_delta=0", "greater than 0"),
    ("ref_model.refresh_mix=0.5", "only read if ref_model.refresh_frequency is not 0"),
    ("train_model.attn_implementation=flash", "auto, sdpa, eager, flash_attention_2"),
    ("train_model.attn_implementation=eager", "write train_model.shared_prefix=false train_model.attn"),
    ("train_model.prefix_attention=flash", "auto, varlen, dense"),
    (
        "train_model.prefix_attention=varlen train_model.shared_prefix=false",
        "write train_model.prefix_attention=auto",
    ),
    ("train_model.prefix_attention=varlen train_model.autocast=no", "computes in 16 bits"),
    ("train_model.lora.rank=-1", "at least 0"),
    ("train_model.lora=4", "write for example train_model.lora.rank=VALUE"),
    ("train_model.lora.target_modules=q_proj", "a list of names"),
    ("train_model.quantization=nf4", "write train_model.lora.rank=16 train_model.quantization=nf4"),
    (
        "train_model.lora.rank=8 policy.kl_coef=0.1 ref_model.refresh_frequency=5",
        "write ref_model.refresh_frequency=0",
    ),
    (
        "policy.kl_coef=0.1 ref_model.refresh_frequency=1 ref_model.refresh_mix=0.5 ref_model.dtype=bfloat16",
        "float32",
    ),
    ("policy.overlong_buffer=3", "write policy.overlong=penalise policy.overlong_buffer=3"),
    ("policy.aggregation_length=3", "write policy.aggregation=constant"),
    ("policy.kl_coef=0.1 policy.kl_in=weights", "policy.kl_in=loss"),
    ("policy=maxent policy.kl_in=loss", "policy.kl_in=weights"),
    (
        "policy.tau=0.5",
        "only read if policy.advantage_estimator is maxent, and that is group_mean; write policy=maxent pol",
    ),
    ("policy=dapo policy.q_temperature=0.5", "write policy=maxent policy.q_temperature=0.5, or"),
    ("policy.q_epsilon=0.01", "policy.q_epsilon=1e-06"),
    ("policy.length_normalize_ref=false", ", or policy.length_normalize_ref=true"),
    ("policy.correction_cap=3.0", "write policy.proximal=trainer policy.correction=truncate policy.corr"),
    ("policy.correction_level=sequence", "only read if policy.correction is not none"),
    ("policy.kl_coef=0.1 policy.kl_horizon=500", "only read if policy.kl_target is not null"),
    ("policy.entropy_coef=0.1 policy.entropy_delta=0.1", "only read if policy.entropy_target is not null"),
    ("policy.entropy_coef_max=0.1", "only read if policy.entropy_target is not null"),
    ("policy.max_refills=5", "write policy.constant_groups=refill policy.max_refills=5"),
    ("policy=maxent policy.tau=0 policy.kl_coef=0", "policy.tau=0.1"),
    (
        "policy=distill",
        "teacher_model.name=null: policy.distill_coef=1.0, as policy=distill sets it, needs a t",
    ),
    ("teacher_model.name=smollm2-135m", "write policy=distill teacher_model.name=smollm2-135m, or"),
    (
        "policy.advantage_estimator=none",
        "write policy=distill teacher_model.name=NAME, or policy.advantage_est",
    ),
    (
        "policy=distill teacher_model.name=smollm2-135m policy.kl_coef=0.1",
        "policy.kl_coef=0.1: with policy.distill_coef=1.0, as",
    ),
    (
        "policy=distill teacher_model.name=smollm2-135m policy.kl_target=0.1 policy.init_kl_coeff=0.1",
        "place of the reference model",
    ),
    ("policy=distill teacher_model.name=smollm2-135m ref_model.num_devices=1", "ref_model.num_devices=auto"),
    (
        "policy=distill teacher_model.name=smollm2-135m ref_model.refresh_frequency=1",
        "there is no reference model",
    ),
    (
        "policy=distill teacher_model.name=smollm2-135m policy.constant_groups=drop",
        "policy.constant_groups=keep",
    ),
    ("policy=distill teacher_model.name=smollm2-135m policy.ratio=sequence", "policy.ratio=token"),
    (
        "policy=distill teacher_model.name=smollm2-135m policy.overlong=penalise",
        "nothing is learned from rewards",
    ),
    (
        "policy=distill teacher_model.name=smollm2-135m policy.reward_combination=apart",
        "nothing is normalized with policy.advantage_estimator=none",
    ),
    (
        "policy=maxent policy.kl_coef=0 teacher_model.name=smollm2-135m policy.distill_coef=1",
        "judges each token",
    ),
    (
        "policy=distill teacher_model.name=smollm2-135m teacher_model.devices=[0,0]",
        "teacher_model.devices=[0]",
    ),
    ("policy=distill teacher_model.name=smollm2-135m policy.distill_coef=-1", "at least 0"),
    ("policy=distill teacher_model.name=smollm2-135m teacher_model.hint=help", "it has no {solution}, which"),
    (
        "policy=distill teacher_model.name=smollm2-135m env.tools=[calculator] "
        "teacher_model.hint='{solution}'",
        "in episodes the environment or the tools write the prompt",
    ),
    ("policy=maxent policy.tau=-1", "at least 0"),
    ("policy=maxent policy.q_temperature=0", "greater than 0"),
    ("policy=maxent policy.q_epsilon=0.2", "env.repeats=8"),
    (
        "policy=maxent policy.reward_combination=apart",
        "takes one sum of rewards for a response; write policy.reward_combination=together, or policy=grpo ",
    ),
    ("ref_model.refresh_frequency=-1", "at least 0"),
    ("ref_model.refresh_frequency=10", "write policy.kl_coef=0.01"),
    ("ref_model.refresh_mix=0", "greater than 0"),
    ("ref_model.refresh_mix=1.5", "at most 1"),
    ("policy.clip_epsilon=0", "greater than 0"),
    ("policy.clip_epsilon=1.1", "at most 1"),
    ("policy.clip_epsilon_high=-0.1", "greater than 0"),
    ("policy.kl_coef=-0.01", "at least 0"),
    ("policy.kl_coef=nan", "finite"),
    ("policy.kl_estimator=k4", "k1, k2, k3"),
    ("policy.kl_in=both", "loss, reward"),
    ("train_model.autocast=int8", "auto, no, bf16, fp16"),
    ("ref_model.dtype=int8", "bfloat16"),
    ("inference_model.dtype=fp8", "bfloat16"),
    ("inference_model.backend=sglang", "vllm, vllm_server, sglang_server, transformers"),
    (
        "inference_model.engine_args={max_num_batched_tokens:64,enable_chunked_prefill:false}",
        "tokens may not be cut; write inference_model.engine_args.max_num_batched_tokens=1024 or",
    ),
    (
        "inference_model.server_python=/usr/bin/python3",
        "only read if inference_model.backend is sglang_server",
    ),
    (
        "inference_model.backend=sglang_server inference_model.engine_args.tp_size=2",
        "write inference_model.num_devices=2",
    ),
    (
        "inference_model.backend=sglang_server inference_model.engine_args.tokenizer_worker_num=2",
        "it is 1, because all requests pass through the process that names the weights",
    ),
    (
        "inference_model.backend=sglang_server inference_model.tensor_parallel_size=2",
        "an engine of inference_model.backend=sglang_server has one device; "
        "write inference_model.backend=vllm_server or",
    ),
    (
        "inference_model.backend=sglang_server inference_model.pipeline_parallel_size=2",
        "inference_model.pipeline_parallel_size=2: an engine of inference_model.backend=sglang_server has",
    ),
    (
        "inference_model.backend=sglang_server inference_model.weight_transfer=in_process",
        "a server is a process of its own",
    ),
    (
        "inference_model.backend=sglang_server inference_model.engine_args.context_length=9",
        "write inference_model.max_model_len=VALUE",
    ),
    (
        "inference_model.backend=sglang_server inference_model.engine_args.quantization=fp8",
        "published weights are compared bit by bit",
    ),
    ("inference_model.servers=[http://127.0.0.1:8000]", "write inference_model.backend=vllm_server or inf"),
    (
        "inference_model.backend=vllm_server inference_model.servers=8000",
        "must be auto or a list of addresses",
    ),
    ("inference_model.backend=vllm_server inference_model.servers=[]", "must be auto or a list of addresses"),
    ("inference_model.backend=vllm_server inference_model.servers=[8000]", "must be auto or a list of addr"),
    ("inference_model.backend=vllm_server inference_model.servers=[host]", "'host' is no address"),
    ("inference_model.backend=vllm_server inference_model.servers=[http://a:b]", "which is http://HOST:PO"),
    ("inference_model.backend=vllm_server inference_model.servers=[http://a/v1]", "'http://a/v1' is no addr"),
    ("inference_model.backend=vllm_server inference_model.servers=[unix:socket]", "or unix:/PATH; write"),
    (
        "inference_model.backend=vllm_server inference_model.servers=[http://a,http://a]",
        "names a server twice; write inference_model.servers=[http://a]",
    ),
    (
        "inference_model.backend=vllm_server inference_model.num_devices=2 inference_model.servers=[unix:/a]",
        "inference_model.servers names 1 servers; write inference_model.num_devices=auto",
    ),
    (
        "inference_model.backend=vllm_server inference_model.servers=[http://a] inference_model.devices=[1]",
        "run already and have their GPUs; write inference_model.devices=null",
    ),
    (
        "inference_model.backend=vllm_server inference_model.servers=[http://a] "
        "inference_model.engine_args.swap_space=1",
        "the servers of inference_model.servers run already",
    ),
    ("inference_model.backend=vllm_server inference_model.servers=['http://[::1:8000']", "is no address"),
    ("inference_model.backend=vllm_server inference_model.servers=[http://a:1?x]", "is no address"),
    ("inference_model.backend=vllm_server inference_model.servers=[http://u:p@a:1]", "is no address"),
    (
        f"inference_model.backend=vllm_server inference_model.servers=[unix:/{'a' * 107}]",
        "no address, which is http://HOST:PORT or unix:/PATH",
    ),
    (
        "inference_model.backend=vllm_server "
        "inference_model.servers=[http://127.0.0.1:8000,http://localhost:8000/]",
        "names a server twice; write inference_model.servers=[http://127.0.0.1:8000]",
    ),
    (
        "inference_model.backend=vllm_server inference_model.servers=[unix:/a,unix:///a]",
        "names a server twice; write inference_model.servers=[unix:/a]",
    ),
    ("inference_model.backend=vllm_server ray.address=auto", "servers do not run on Ray; write inference_mo"),
    ("inference_model.engine_args.middleware=own", "write nothing for middleware"),
    ("inference_model.engine_args.port=8000", "write inference_model.servers=VALUE"),
    ("inference_model.temperature=0", "greater than 0"),
    ("inference_model.temperature=0.005", "write inference_model.temperature=0.01"),
    ("eval.temperature=0.0099", "inference_model.backend=vllm samples at 0.01 or more"),
    ("inference_model.gpu_memory_utilization=1.5", "at most 1"),
    ("inference_model.gpu_memory_utilization=0", "greater than 0"),
    ("inference_model.max_new_tokens=0", "at least 1"),
    ("inference_model.engine_args.dtype=half", "write inference_model.dtype=VALUE"),
    ("inference_model.engine_args={max_model_len:99}", "write inference_model.max_model_len=VALUE"),
    ("inference_model.head_dtype=bfloat16", "auto, float32"),
    (
        "inference_model.engine_args.hf_overrides={head_dtype:float32}",
        "write inference_model.head_dtype=float32",
    ),
    ("inference_model.engine_args.hf_overrides=7", "it has entries of the model's configuration"),
    ("inference_model.engine_args.logprobs_mode=raw_logprobs", "write nothing for logprobs_mode"),
    ("inference_model.engine_args.tensor_parallel_size=2", "write inference_model.tensor_parallel_size=2"),
    ("inference_model.tensor_parallel_size=2", "write inference_model.backend=vllm_server or"),
    ("inference_model.weight_transfer=folder", "write inference_model.backend=vllm_server or"),
    ("inference_model.weight_folder=there", "write inference_model.weight_transfer=folder"),
    ("inference_model.weight_transfer=shared_memory", "only servers get weights in this way"),
    (
        "inference_model.backend=transformers inference_model.engine_args.swap_space=0",
        "write inference_model.backend=vllm or inference_model.engine_args={}",
    ),
    ("optimizer.lr=inf", "finite"),
    ("optimizer.lr=-1e-5", "at least 0"),
    ("optimizer.betas=[0.9]", "two numbers"),
    ("optimizer.betas=[0.9,1.0]", "below 1"),
    ("optimizer.betas=[nan,0.9]", "finite"),
    ("optimizer.schedule=sawtooth", "constant, linear, cosine"),
    ("optimizer.max_grad_norm=0", "greater than 0"),
    ("optimizer.min_lr_ratio=2", "at most 1"),
    ("reward.timeout_s=0", "greater than 0"),
    ("reward.on_error=-inf", "finite"),
    ("reward.weights.beauty=1", "math_verify"),
    ("reward.weights.vowels=1", ", for example, or reward.functions={vowels:FILE.py:vowels} beside it"),
    ("reward.weights.format=nan", "finite"),
    ("reward.weights={gsm8k:0,format:0}", "every weight is 0"),
    ("eval.pass_at_k=0", "at least 1"),
    ("eval.temperature=-1", "greater than 0"),
    ("checkpoint.keep=0", "at least 1"),
    ("logging.backends=[csv,mlflow]", "csv, tensorboard, wandb"),
    ("logging.backends=[csv,csv]", "twice"),
    ("logging.entity=''", "must not be empty"),
    ("logging.tags=['']", "1 to 64 characters"),
    ("logging.tags=[night]", "write logging.tags=[], or logging.backends=[wandb]"),
    ("data.filter_overlong_prompts=true", "write env.overlong_prompts=drop instead"),
    ("data.truncation=left", "write env.overlong_prompts=truncate_left instead"),
    ("inference_model.engine_args.max_logprobs=5", "write nothing for max_logprobs"),
    ("logging.tags=night", "a list of names in square brackets"),
    # devices
    (
        "train_model.num_devices=2 train_model.parallelism=fsdp2 train_model.autocast=fp16",
        "train_model.autocast=bf16",
    ),
    ("train_model.parallelism=fsdp2 train_model.lora.rank=8", "train_model.parallelism=ddp"),
    ("train_model.parallelism=fsdp", "one of auto, ddp, fsdp2, deepspeed_zero2, deepspeed_zero3"),
    ("train_model.num_devices=0", "at least 1"),
    ("train_model.num_devices=two", "auto or a whole number of at least 1"),
    ("train_model.num_devices=1.5", "a whole number or text"),
    ("inference_model.num_devices=-1", "write inference_model.num_devices=1"),
    ("ref_model.num_devices=0", "write ref_model.num_devices=1"),
    ("inference_model.devices=[0,0]", "write inference_model.devices=[0]"),
    ("inference_model.num_devices=3 inference_model.devices=[0,1]", "write inference_model.num_devices=2"),
    ("dry_run=perhaps", "true or false"),
    ("inference_model.devices=[-1]", "at least 0"),
    ("inference_model.devices=[]", "a list of device numbers"),
    # combinations
    ("train.total_dialog_turns=100", "a multiple of one collection round, 8 prompts"),
    ("train.total_dialog_turns=0", "at least 1"),
    (
        "train.total_dialog_turns=64000 train.num_epochs=2",
        "write train.total_dialog_turns=null train.num_epochs=2.0, or train.total_dialog_turns=64000 train",
    ),
    (
        "env.sampling=pass_rate train.num_epochs=2",
        "write train.total_dialog_turns=64000 train.num_epochs=null",
    ),
    # brackets that are missing
    ("reward.functions=good.py:r", "reward.functions={r:good.py:r}, for example"),
    ("reward.functions=[good.py:r,bad.py:s]", "reward.functions={r:good.py:r,s:bad.py:s}, for example"),
    ("reward.functions=good.py", "reward.functions={NAME:FILE.py:FUNCTION}, for example"),
    ("reward.functions=r:good.py:r", "reward.functions={r:good.py:r}, for example"),
    ("reward.weights=format", "error: reward.weights=format: it must be a mapping of names to numbers"),
    ("reward.weights=[format,gsm8k]", "reward.weights={format:1.0,gsm8k:1.0}, for example"),
    ("reward.weights=null", "write reward.weights={}, for example"),
    ("reward.weights={format}", "write reward.weights={format:1.0} instead"),
    ("env.fields=question:q,answer:a", "write env.fields={question:q,answer:a} instead"),
    ("env.tools=my_tools.py:f", "env.tools=[my_tools.py:f], for example"),
    ("env.tools=null", "env.tools=[], for example"),
    ("logging.backends=wandb", "logging.backends=[wandb], for example"),
    # data sets and tasks
    (
        "env.task=chain_sum env.dataset=my.py:load",
        "write env.dataset=reasoning_gym env.task=chain_sum, or env.task=null",
    ),
    (
        "env.environment=guess env=reasoning_gym env.task=chain_sum",
        "write another env.dataset, or env.environment=null env.tools=[]",
    ),
    ("train.total_dialog_turns=null", "write train.num_epochs=1 or train.total_dialog_turns=64000"),
    ("train.total_dialog_turns=null train.num_epochs=0", "greater than 0"),
    ("total_train_epochs=5", "write train.num_epochs=5 instead"),
    ("eval_steps=50", "write eval.frequency=50 instead"),
    ("temperature=0.7", "write inference_model.temperature=0.7 instead"),
    ("train.optim_batch_size=12", "a multiple of env.repeats=8"),
    ("train.optim_batch_size=24", "one of 8, 16, 32, 64"),
    ("train.optim_batch_size=128", "divides one round"),
    ("train.gradient_accumulation_steps=5", "write train.gradient_accumulation_steps=4"),
    ("train.gradient_accumulation_steps=128", "batch of 64 samples"),
    ("train.max_tokens_per_microbatch=512", "write train.max_tokens_per_microbatch=1024"),
    ("train.max_tokens_per_microbatch=0", "at least 1"),
    ("inference_model.max_new_tokens=1024", "no room for a prompt"),
    ("inference_model.sleep=true", "only on a CUDA device"),
    ("env.task=chain_sum", "only read if env.dataset is reasoning_gym"),
    ("env.task_args.max_terms=3", "only reasoning_gym has"),
    ("env.dataset=reasoning_gym", "env.task=chain_sum"),
    ("env=reasoning_gym env.data_path=.", "reads neither files nor the hub"),
    ("env=reasoning_gym env.hub_name=a/b", "reads neither files nor the hub"),
    ("env=reasoning_gym env.eval_split=test", "write env.eval_split=null"),
    ("env.overlong_prompts=truncate", "error, drop, truncate_left, truncate_right, truncate_middle"),
    (
        "env=reasoning_gym env.overlong_prompts=drop",
        "write env.overlong_prompts=error or env",
    ),
    ("env.train_split=''", "must not be empty"),
    ("env=ifeval env.train_split=train", "those of env.eval_split, and other training prompts are composed"),
    ("env.dataset=jsonl", "needs a file"),
    ("env=jsonl env.data_path=. env.fields.answer=''", "that of answer if there is one"),
    (
        "env.dataset=jsonl env.data_path=. env.fields={question:q,explanation:s}",
        "explanation is none of question, messages, answer, solution, identity, images; write env.fields={",
    ),
    (
        "env=jsonl env.data_path=. env.fields={question:q,solutions:s}",
        "write env.fields={question:q,solution:s}",
    ),
    ("env.dataset=jsonl env.data_path=. env.fields={question:q,messages:m}", "of question or of messages"),
    ("env.dataset=pictures", "write model.pictures=true beside it"),
    ("env.dataset=clevr_count", "write model.pictures=true beside it"),
    ("env.dataset=geometry3k model.pictures=true env.fields={images:i}", "or env=jsonl env.data_path="),
    (
        "env.dataset=pictures model.pictures=true env.task_args={kinds:[cats]}",
        "it must be a list of count, clock, bars, dice, number_line, fraction",
    ),
    ("env.dataset=pictures model.pictures=true env.task_args={size:8}", "a number of pixels from 32 to 2048"),
    ("env.dataset=pictures model.pictures=true env.task_args={color:1}", "color is none of kinds, size"),
    ("env.dataset=pictures model.pictures=true env.data_path=.", "reads neither files nor the hub"),
    ("env.dataset=pictures model.pictures=true env.overlong_prompts=drop", "env.overlong_prompts=error"),
    ("env.mixture=[{dataset:gsm8k},{dataset:pictures}]", "pictures are not mixed with other data sets yet"),
    ("env=jsonl env.data_path=. env.fields={question:q,images:i}", "write model.pictures=true beside it"),
    (
        "model.pictures=true train_model.lora.rank=8 train_model.quantization=nf4",
        "or train_model.quantization=none",
    ),
    ("model.pictures=true teacher_model.name=/tmp policy.distill_coef=1", "or policy.distill_coef=0"),
    ("model.pictures=true train_model.compile=true", "or train_model.compile=false"),
    ("model.pictures=true inference_model.backend=sglang_server", "or inference_model.backend=vllm"),
    ("model.pictures=true env.overlong_prompts=truncate_left", "or env.overlong_prompts=drop"),
    ("model.pictures=true env.tools=[calculator]", "or env.tools=[]"),
    ("model.pictures=true env.mixture=[{dataset:gsm8k},{dataset:math}]", "or env.mixture=[]"),
    ("train_model.vision_tower=true", "it is only read if model.pictures is not false"),
    ("env.dataset=x.jsonl", "write env=jsonl env.data_path=x.jsonl"),
    ("env.dataset=me/mine", "write env=jsonl env.hub_name=me/mine"),
    ("env.dataset=my_data.py", "names no function of your own"),
    ("env.dataset=my_data.py:load env.train_split=train", "has no splits"),
    ("env.dataset=my_data.py:load env.hub_name=a/b", "reads neither files nor the hub"),
    ("env.dataset=my_data.py:load env.data_path=.", "reads neither files nor the hub"),
    ("env.environment=gues", "write env.environment=guess"),
    ("env.environment=my_env.py", "names no class of your own"),
    ("env.environment_args={a:1}", "only read if env.environment is not null"),
    ("env.tools=[calculatr]", "write env.tools=[calculator]"),
    ("env.tools=[my_tools.py]", "names no function of your own"),
    ("env.tools=[calculator,calculator]", "names a tool twice"),
    ("env.environment=guess env.max_turns=0", "env.max_turns=0: it must be at least 1"),
    ("env.tools=[calculator] env.tool_timeout_s=0", "must be greater than 0"),
    ("env.environment=openenv:", "is followed by neither http://, https:// nor a command"),
    ("env.environment=openenv:ws://localhost:8000/ws", "is followed by neither http://"),
    ("env.environment=openenv:http://:8000", "names no server"),
    ("env.environment=openenv:my_server", "does not say where its port goes"),
    ("env.environment=mcp:http://127.0.0.1:8000", "this key takes openenv:URL and openenv:COMMAND"),
    ("env.tools=[openenv:http://127.0.0.1:8000]", "this key takes mcp:URL and mcp:COMMAND"),
    ("env.tools=[calculator] env.allowed_tools=[add]", "no server offers tools"),
    ("env.tools=[calculator] env.max_tool_characters=0", "must be at least 1"),
    ("env.tools=[calculator] collector.partial_rollout=true", "stays with the worker"),
    (
        "collector.partial_rollout=true",
        "ahead of the trainer; write collector.partial_rollout=false, or call grpo-async.py",
    ),
    ("collector.max_policy_age=2", "write collector.max_policy_age=0, or call grpo-async.py"),
    ("env.tools=[calculator] env.overlong_prompts=truncate_left", "write env.overlong_prompts=drop"),
    ("env.tools=[calculator] env=reasoning_gym env.task=chain_sum", "an episode's prompt is made before"),
    ("reward.weights={environment:1}", "there is no environment that gives this reward"),
    ("eval.reward=environment", "there is no environment that gives this reward"),
    ("env.fields={question:q,answer:a}", "only jsonl reads this"),
    ("env.train_on_ifeval=true", "env.dataset=ifeval"),
    ("reward.weights.ifeval=1", "cannot judge env.dataset=gsm8k"),
    ("env=ifeval reward.weights.gsm8k=1", "cannot judge env.dataset=ifeval"),
    # resume
    ("resume=auto", "no run below"),
    ("resume=nowhere", "resume=nowhere: there is no such folder in "),
    ("resume=/nowhere", "resume=/nowhere: there is no such folder; write"),
    ("hydra.run.dir=nowhere resume=auto", "nowhere has no complete checkpoint"),
    ("hydra.run.dir=elsewhere resume=auto", "resume=auto without hydra.run.dir for the run that wrote a che"),
    ("--multirun resume=auto optimizer.lr=1e-4,1e-5", "a sweep cannot be resumed"),
    # sweeps: every job is looked at before the first starts
    ("--multirun optimizer.lr=1e-4,-1", "optimizer.lr=-1"),
    ("--multirun optimizer.lr=1e-4,slow", "optimizer.lr=slow"),
    ("--multirun policy=grpo,ppo", "policy=ppo"),
    ("--multirun env.repeats=8,3", "a multiple of one collection round"),
    ("--multirun optimizer.lr=interval(0,1)", "takes lists only"),
    ("sweep.devices=1", "write --multirun sweep.devices=1 instead"),
    ("--multirun sweep.seeds=2 seed=1,2", "seed is set too"),
    ("--multirun sweep.devices=9999 optimizer.lr=1e-4,1e-5", "each trial would need so many"),
    ("--multirun sweep.devices=1 sweep.resume=nothing optimizer.lr=1e-4,1e-5", "it is no folder of a sweep"),
    ("--multirun sweep.devices=1 hydra/launcher=basic optimizer.lr=1e-4,1e-5", "write one of the two"),
    ("policy=glob(*)", "write --multirun policy=glob(*) instead"),
    ("--multirun policy=glob(x*)", "matches none of cispo, dapo"),
    ("--multirun optimizer.lr=glob(*)", "write --multirun optimizer.lr=VALUE,VALUE instead"),
    ("train_model.devices=0,1", "write train_model.devices=[0,1] instead"),
]


@pytest.mark.parametrize(("line", "says"), BAD, ids=[line for line, _ in BAD])
def test_mistake(
    line: str, says: str, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "cuda_device_present", lambda: False)
    earlier = write_run(workplace / "earlier" / "run", 1, 2)
    before = snapshot(workplace)
    words = line.split()
    message = mistake(capsys, *words)
    assert says in message
    if not line.startswith("--"):
        # the last word is the wrong one: its key is named, and its value as far as it is not a list of many
        assert words[-1].lstrip("+~").split("=")[0].rsplit(".", 1)[-1] in message
    assert snapshot(workplace) == before, "a mistake leaves no folder and touches no run"
    assert earlier.exists()


def test_a_folder_may_have_the_name_of_a_built_in_data_set(workplace: Path) -> None:
    (workplace / "gsm8k").mkdir()
    accept("env.dataset=gsm8k")


@pytest.mark.parametrize(
    "line",
    [
        "policy=maxent policy.tau=0.5 policy.q_temperature=0.5 policy.q_epsilon=0.01",
        "policy=maxent policy.length_normalize_ref=false",
        "policy.proximal=trainer policy.correction=truncate policy.correction_cap=3.0",
        "policy.proximal=trainer policy.correction=mask policy.correction_level=sequence",
        "policy.init_kl_coeff=0.1 policy.kl_target=0.1 policy.kl_horizon=500",
        "policy.entropy_target=1.0 policy.entropy_delta=0.1 policy.entropy_coef_max=0.1",
        "policy.constant_groups=refill policy.max_refills=5",
        "inference_model.temperature=0.01 eval.temperature=0.01",
        "inference_model.backend=transformers inference_model.temperature=0.005 eval.temperature=0.005",
        *(
            f"policy={path.stem}" + (" teacher_model.name=smollm2-135m" if path.stem == "distill" else "")
            for path in sorted((Path(__file__).parents[2] / "config/policy").glob("*.yaml"))
        ),
    ],
)
def test_what_the_messages_advise_works(line: str) -> None:
    accept(*line.split())


@pytest.mark.parametrize(
    "line",
    [
        "policy.tau=0.5",
        "policy.q_temperature=0.5",
        "policy.q_epsilon=0.01",
        "policy.q_epsilon=0.5",
        "policy.length_normalize_ref=false",
        "policy.correction_level=sequence",
        "policy.correction_cap=3.0",
        "policy.correction_cap=0.5",
        "policy.correction_floor=0.5",
        "policy.correction_floor=3",
        "policy.kl_horizon=500",
        "policy.kl_horizon=20",
        "policy.kl_coef=0.01 policy.kl_horizon=5000",
        "policy.kl_coef=0.01 policy.kl_horizon=20",
        "policy.init_kl_coeff=0.2 policy.kl_horizon=5000",
        "policy.entropy_delta=0.1",
        "policy.entropy_delta=0",
        "policy.entropy_coef_max=0.1",
        "policy.entropy_coef_max=0",
        "policy.entropy_coef=0.5 policy.entropy_coef_max=0.1",
        "policy.max_refills=5",
    ],
)
def test_what_reads_an_unread_key_is_advised_as_it_is_accepted(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = mistake(capsys, *line.split())
    for advice in advised(message):
        changed = {word.partition("=")[0]: word for word in [*line.split(), *advice.split()]}
        if "init_kl_coeff" in line and "kl_target" not in advice:
            del changed["policy.init_kl_coeff"]  # A mistake of its own, which this advice is not about.
        accept(*changed.values())


def advised(message: str) -> list[str]:
    """The ways out that a message names."""
    return re.split(r",? or ", message.partition("write ")[2].removesuffix("\n"))


@pytest.mark.parametrize(
    "line",
    [
        "policy=maxent policy.kl_in=reward",
        "policy=maxent policy.kl_in=loss",
        "policy=maxent policy.reward_combination=apart",
        "policy=cispo policy.dual_clip=3",
        "policy=sapo policy.dual_clip=3",
        "policy.kl_coef=0.1 policy.kl_in=weights",
        "policy=sapo policy.surrogate_args.temperature_positive=0",
        "train.total_dialog_turns=64000 train.num_epochs=2",
        "env.sampling=pass_rate train.num_epochs=2",
        "env.task=chain_sum",
    ],
)
def test_each_way_out_of_a_contradiction_is_accepted(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    for advice in advised(mistake(capsys, *line.split())):
        changed = {word.partition("=")[0]: word for word in [*line.split(), *advice.split()]}
        if "env.dataset=reasoning_gym" not in advice:
            changed.pop("env.task", None)
        accept(*changed.values())


def test_there_are_enough_mistakes() -> None:
    assert len(BAD) >= 60 and len({line for line, _ in BAD}) == len(BAD)


def test_value_is_named_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: optimizer.lr=1e-4x: it must be a number" in mistake(capsys, "optimizer.lr=1e-4x")
    assert "env.repeats=1: it must be at least 2" in mistake(capsys, "env.repeats=1")


@pytest.mark.slow
def test_mistake_in_a_configuration_file(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = workplace / "mine"
    mine.mkdir()
    head = "defaults: [schema, base, {env: gsm8k}, {policy: grpo}, _self_]\n"
    cases = {
        "optimizer: {learning_rate: 1}": "there is no key optimizer.learning_rate",
        "optimizer: {lr: fast}": "optimizer.lr",
        "hydra_test: 1": "there is no key hydra_test",
        "env: {repeats: 1}": "env.repeats=1",
        "optimizer: [": "my.yaml: cannot be read",
        "inference_model: {backend: lmdeploy}": "inference_model.backend=lmdeploy: it must be one of vllm, ",
    }
    for body, says in cases.items():
        (mine / "my.yaml").write_text(head + body)
        message = mistake(capsys, "--config-dir", str(mine), "--config-name", "my")
        assert says in message
    (mine / "my.yaml").write_text(head + "optimizer: {lr: 0.5}")
    assert call("--config-dir", str(mine), "--config-name", "my", "env.num_envs=4") == 0
    assert (SEEN[0][0].optimizer.lr, SEEN[0][0].env.num_envs) == (0.5, 4)
