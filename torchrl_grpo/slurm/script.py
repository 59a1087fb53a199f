"""The text of a batch script: what all jobs have in common, and the steps of each layout."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_grpo.cli.endings import STOPPED_CODE
from torchrl_grpo.config.values import KEY_VARIABLE
from torchrl_grpo.slurm.layout import Layout
from torchrl_grpo.slurm.options import EARLY_S, SlurmOptions

# Attempts in a row that may save nothing. A job may be preempted as soon as it has begun.
_IDLE_ATTEMPTS = 3
FOLDER_TRANSFER = "inference_model.weight_transfer=folder"


@dataclass(frozen=True)
class Run:
    """What the job runs.

    Attributes:
        script: name of the training command.
        common: arguments that name the configuration. The trainer gets them, and so do the servers.
        trainer_overrides: overrides of the trainer, except those known only inside the job.
        server_overrides: overrides of the servers.
        command: command that has made the script.
    """

    script: str
    common: Sequence[str]
    trainer_overrides: Sequence[str]
    server_overrides: Sequence[str]
    command: str


def batch_script(run: Run, options: SlurmOptions, layout: Layout) -> str:
    """Return the text of the batch script."""
    plan = [f"#   {line}" for line in layout.plan.table().splitlines()]
    lines = [
        "#!/bin/bash",
        *options.header(),
        "#",
        f"# Made by {run.command}",
        f"# {layout.describe()}. On the first node:",
        *plan,
        "set -eo pipefail",
        "",
        *options.setup,
        *([""] if options.setup else []),
        _COMMON.format(
            folder=options.folder if options.folder.startswith("/") else f"$PWD/{options.folder}",
            signal=options.signal_s,
            least=options.signal_s + EARLY_S,
        ),
        *(_PORT.splitlines() if layout.nodes > 1 else []),
        *_steps(run, options, layout),
        "",
        _END.format(stopped=STOPPED_CODE, idle=_IDLE_ATTEMPTS),
    ]
    return "\n".join(lines)


# What happens in every job: folders, steps with logs, and what the script does with signals.
_COMMON = """\
attempt=${{SLURM_RESTART_COUNT:-0}}
job="{folder}/$SLURM_JOB_ID"
logs="$job/logs/$attempt"
mkdir -p "$logs"
ln -sfn "$attempt" "$job/logs/latest"
export run="$job/run"

say() {{
    echo "$(date '+%F %T') attempt $attempt: $*"
}}

# The limit may be that of the partition, or one that sbatch was given: [DAYS-]HOURS:MINUTES:SECONDS.
limit=$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* TimeLimit=\\([^ ]*\\).*/\\1/p')
if [[ "$limit" =~ ^(([0-9]+)-)?([0-9]+):([0-9]+):([0-9]+)$ ]]; then
    limit_s=$((10#${{BASH_REMATCH[2]:-0}} * 86400 + 10#${{BASH_REMATCH[3]}} * 3600))
    limit_s=$((limit_s + 10#${{BASH_REMATCH[4]}} * 60 + 10#${{BASH_REMATCH[5]}}))
    if (( limit_s <= {least} )); then
        say "the time limit of $limit leaves no time to train: the run saves itself {signal} seconds" \\
            "before it, and Slurm may be a minute early; give --time to python -m torchrl_grpo.slurm"
        exit 2
    fi
fi

# The step of the newest checkpoint; empty without one.
newest() {{
    find "$run/checkpoints" -maxdepth 1 -printf '%f\\n' 2> /dev/null | grep -xE '[0-9]+' | sort -n | tail -n 1
}}
before=$(newest || true)

stopping=0 current="" watchers=()

# Run a function of this script as a step, with a log of its own: step NAME SRUN_OPTION... FUNCTION
step() {{
    local name=$1 task=${{!#}}
    exec srun --job-name="${{name%-%t}}" --output="$logs/$name.log" --kill-on-bad-exit=1 --export=ALL \\
        --cpu-bind=none "${{@:2:$#-2}}" bash -c "set -e; $(declare -f); $task"
}}

# Run a step to its end, and pass signals on to it.
run_step() {{
    local code=0
    # The code of a step that SIGUSR1 has ended.
    (( ! stopping )) || return 138
    say "$1 begins"
    step "$@" &
    current=$!
    pass_on
    # A signal to this script ends the wait and not the step.
    while kill -0 "$current" 2> /dev/null; do wait "$current" || true; done
    wait "$current" || code=$?
    current=""
    say "$1 has ended with code $code"
    return "$code"
}}

# Run a step that must last as long as the others. The job fails when it ends.
keep_step() {{
    (
        step "$@" &
        wait "$!" || true
        say "${{1%-%t}} has ended, and the job needs it; see its log in $logs"
        kill -USR2 $$
    ) &
    watchers+=("$!")
    say "${{1%-%t}} begins"
}}

pass_on() {{
    if (( stopping )) && [[ -n "$current" ]]; then
        kill -USR1 "$current" 2> /dev/null || true
    fi
}}

trap 'stopping=1; pass_on' USR1
# When this script ends, Slurm ends the steps that still run: with SIGTERM, and later with SIGKILL.
trap 'exit 1' USR2
trap 'kill "${{watchers[@]}}" 2> /dev/null || true' EXIT
"""

_PORT = """\
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
others=$(IFS=,; echo "${nodes[*]:1}")
# The port depends on the job id, so jobs on one node do not clash. The range lies between Ray's worker ports
# and the ephemeral ports.
export port=$((20000 + SLURM_JOB_ID * 64 % 12000))

address_of() {
    scontrol show node -o "$1" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p'
}
"""

# Restrict a step, to which Slurm gives all GPUs of the node, to the given ones.
_ONLY_GPUS = """\
only_gpus() {
    local all number chosen=()
    IFS=, read -ra all <<< "$CUDA_VISIBLE_DEVICES"
    for number in "$@"; do chosen+=("${all[number]}"); done
    CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${chosen[*]}")
    export CUDA_VISIBLE_DEVICES
}
"""

_END = """\
# The run has saved itself, or was asked to before it had begun.
if (( code == {stopped} || (stopping && code >= 128) )); then
    # It must not go on like this for ever.
    idle=0
    if [[ "$(newest || true)" == "$before" ]]; then
        idle=$(( $(cat "$job/idle" 2> /dev/null || echo 0) + 1 ))
    fi
    echo "$idle" > "$job/idle"
    if (( idle >= {idle} )); then
        say "{idle} attempts in a row have saved nothing, so the job ends; make the script again" \\
            "with a larger --time or a smaller --signal-seconds"
        exit 1
    fi
    say "the job goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
"""


def _steps(run: Run, options: SlurmOptions, layout: Layout) -> list[str]:
    if layout.nodes == 1:
        return [
            *_function("trainer", _trainer(run, [])),
            "code=0",
            "run_step trainer --nodes=1 --ntasks=1 --ntasks-per-node=1 trainer || code=$?",
        ]
    return _on_servers(run, options, layout) if layout.servers else _on_ray(run, options, layout)


def uses_job_folder(overrides: Sequence[str]) -> bool:
    """Return whether weights go through the job's own folder, because no ``weight_folder`` is given."""
    named = any(override.startswith("inference_model.weight_folder=") for override in overrides)
    return FOLDER_TRANSFER in overrides and not named


def _on_servers(run: Run, options: SlurmOptions, layout: Layout) -> list[str]:
    gpus, others = layout.gpus > 0, layout.nodes - 1
    listens = ['--host=0.0.0.0 --port="$((port + SLURM_PROCID))"']
    folder = (
        ["\"inference_model.weight_folder='$job/weights'\""] if uses_job_folder(run.trainer_overrides) else []
    )
    return [
        "",
        f"export job {KEY_VARIABLE}",
        f"{KEY_VARIABLE}={_SECRET}",
        "servers=()",
        f"for (( server = 0; server < {layout.engines}; server++ )); do",
        f"    node=${{nodes[1 + server / {layout.per_node}]}}",
        '    servers+=("http://$(address_of "$node"):$((port + server))")',
        "done",
        "export server_list",
        'server_list=$(IFS=,; echo "${servers[*]}")',
        "",
        *(_ONLY_GPUS.splitlines() if gpus else []),
        *([""] if gpus else []),
        *_function(
            "server",
            [
                _IGNORE_USR1,
                *(['only_gpus "$SLURM_LOCALID"'] if gpus else []),
                *_command("grpo-serve", [*run.common, *run.server_overrides], listens),
            ],
        ),
        *_function("gate", _gate(options, "${server_list//,/ }")),
        *_function("trainer", _trainer(run, ['"inference_model.servers=[$server_list]"', *folder])),
        f'keep_step server-%t --nodes={others} --nodelist="$others" --ntasks={layout.engines} \\',
        f"    --ntasks-per-node={layout.per_node} --distribution=block --overcommit server",
        *_gate_and_trainer([]),
    ]


def _on_ray(run: Run, options: SlurmOptions, layout: Layout) -> list[str]:
    gpus, others = layout.gpus > 0, layout.nodes - 1
    left = " ".join(map(str, layout.left_on_first))
    ray = ["--block", "--disable-usage-stats"]
    # Two steps of one node share its cores, memory and GPUs.
    shared = ["--overlap", "--mem=0"]
    return [
        "",
        'address="$(address_of "${nodes[0]}"):$port"',
        "export address",
        "# Whoever reaches Ray's port could run programs as this user.",
        "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN",
        f"RAY_AUTH_TOKEN={_SECRET}",
        "export RAY_free_objects_period_milliseconds=10",
        "",
        *(_ONLY_GPUS.splitlines() if gpus else []),
        *([""] if gpus else []),
        *_function(
            "ray_head",
            [
                _IGNORE_USR1,
                *([f"only_gpus {left}".rstrip()] if gpus else []),
                *_command("ray", ["start", "--head", *ray, "--include-dashboard=false"], ['--port="$port"']),
            ],
        ),
        *_function(
            "ray_worker",
            [
                _IGNORE_USR1,
                f'python -P -m torchrl_grpo.slurm.gate --timeout={options.start_seconds} --ray="$address"',
                *_command("ray", ["start", *ray], ['--address="$address"']),
            ],
        ),
        *_function("gate", _gate(options, f'--ray="$address" --nodes={layout.nodes}')),
        *_function("trainer", _trainer(run, ["\"ray.address='$address'\""])),
        f'keep_step ray-head --nodes=1 --nodelist="${{nodes[0]}}" --ntasks=1 --ntasks-per-node=1 '
        f"{' '.join(shared)} ray_head",
        f'keep_step ray-worker-%t --nodes={others} --nodelist="$others" --ntasks={others} \\',
        "    --ntasks-per-node=1 ray_worker",
        *_gate_and_trainer(shared),
    ]


_SECRET = "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"

# A signal to all steps is meant for the trainer alone. The shell of the step ignores it, and so does the
# program that the shell then runs.
_IGNORE_USR1 = "trap '' USR1"


def _gate_and_trainer(more: Sequence[str]) -> list[str]:
    options = " ".join(['--nodes=1 --nodelist="${nodes[0]}" --ntasks=1 --ntasks-per-node=1', *more])
    return [
        f"first=({options})",
        "code=0",
        '{ run_step gate "${first[@]}" gate && run_step trainer "${first[@]}" trainer; } || code=$?',
    ]


def _gate(options: SlurmOptions, what: str) -> list[str]:
    return [f"exec python -P -m torchrl_grpo.slurm.gate --timeout={options.start_seconds} {what}"]


def _trainer(run: Run, more: Sequence[str]) -> list[str]:
    return _command(
        run.script,
        [*run.common, *run.trainer_overrides, "resume=auto_or_new"],
        ["\"hydra.run.dir='$run'\"", *more],
    )


def _command(program: str, arguments: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return the lines of a command; ``more`` has further arguments as shell text, which is not quoted."""
    parts = [*map(shlex.quote, arguments), *more]
    return [f"exec {program} \\", *[f"    {part} \\" for part in parts[:-1]], f"    {parts[-1]}"]


def _function(name: str, body: Sequence[str]) -> list[str]:
    return [f"{name}() {{", *[f"    {line}" for line in body], "}", ""]
