#!/bin/bash
#SBATCH --job-name=grpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --mem=200G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#
# Made by python -m torchrl_grpo.slurm --script grpo --gpus-per-node=2 --time=24:00:00 --cpus-per-node=16 --memory-per-node=200G --setup 'source .venv/bin/activate'
# one node: the run starts its engines itself. On the first node:
#   role       devices  placement  why
#   train      cuda:0   separate   train_model.num_devices=auto: the first GPU
#   inference  cuda:1   separate   one worker, a GPU of its own; weights by cuda ipc
#   reference  -        off        nothing asks for it (policy.kl_coef=0, no policy.kl_target)
set -eo pipefail
# A signal may come before this script can pass it on.
stopping=0
trap 'stopping=1' USR1

source .venv/bin/activate

# Functions of the user's shell, which steps do not need.
mapfile -t inherited < <(compgen -A function)

attempt=${SLURM_RESTART_COUNT:-0}
job="$PWD/outputs/slurm/$SLURM_JOB_ID"
logs="$job/logs/$attempt"
mkdir -p "$logs"
ln -sfn "$attempt" "$job/logs/latest"
export run="$job/run"

say() {
    echo "$(date '+%F %T') attempt $attempt: $*"
}

# The limit may be that of the partition, or one that sbatch was given: [DAYS-]HOURS:MINUTES:SECONDS.
limit=$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* TimeLimit=\([^ ]*\).*/\1/p') || true
if [[ "$limit" =~ ^(([0-9]+)-)?([0-9]+):([0-9]+):([0-9]+)$ ]]; then
    limit_s=$((10#${BASH_REMATCH[2]:-0} * 86400 + 10#${BASH_REMATCH[3]} * 3600))
    limit_s=$((limit_s + 10#${BASH_REMATCH[4]} * 60 + 10#${BASH_REMATCH[5]}))
    if (( limit_s <= 660 )); then
        say "the time limit of $limit leaves no time to train: the run saves itself 600 seconds" \
            "before it, and Slurm may be a minute early; give --time to python -m torchrl_grpo.slurm"
        exit 2
    fi
fi

# The step of the newest checkpoint; empty without one.
newest() {
    find "$run/checkpoints" -maxdepth 1 -printf '%f\n' 2> /dev/null | grep -xE '[0-9]+' | sort -n | tail -n 1
}
before=$(newest || true)

current="" watchers=()

# Run a function of this script as a step, with a log of its own: step NAME SRUN_OPTION... FUNCTION
# It has the other functions of this script. Those of a user's shell may be longer than an argument can be.
step() {
    local name=$1 task=${!#} functions
    mapfile -t functions < <(compgen -A function | grep -vxFf <(printf '%s\n' "${inherited[@]}"))
    exec srun --job-name="${name%-%t}" --output="${logs//\%/%%}/$name.log" --kill-on-bad-exit=1 --export=ALL \
        --cpu-bind=none "${@:2:$#-2}" bash -c "set -e; $(declare -f "${functions[@]}"); $task"
}

# Run a step to its end, and pass signals on to it.
run_step() {
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
}

# Run a step that must last as long as the others. The job fails when it ends.
keep_step() {
    (
        step "$@" &
        wait "$!" || true
        say "${1%-%t} has ended, and the job needs it; see its log in $logs"
        kill -USR2 $$
    ) &
    watchers+=("$!")
    say "${1%-%t} begins"
}

pass_on() {
    if (( stopping )) && [[ -n "$current" ]]; then
        kill -USR1 "$current" 2> /dev/null || true
    fi
}

trap 'stopping=1; pass_on' USR1
# When this script ends, Slurm ends the steps that still run: with SIGTERM, and later with SIGKILL.
trap 'exit 1' USR2
trap 'kill "${watchers[@]}" 2> /dev/null || true' EXIT

trainer() {
    exec grpo \
        --config-name=grpo_gsm8k \
        resume=auto_or_new \
        "hydra.run.dir='$run'"
}

code=0
run_step trainer --nodes=1 --ntasks=1 --ntasks-per-node=1 trainer || code=$?

# The run has saved itself, or was asked to before it had begun.
if (( code == 75 || (stopping && code >= 128) )); then
    # It must not go on like this for ever.
    idle=0
    if [[ "$(newest || true)" == "$before" ]]; then
        idle=$(( $(cat "$job/idle" 2> /dev/null || echo 0) + 1 ))
    fi
    echo "$idle" > "$job/idle"
    if (( idle >= 3 )); then
        say "3 attempts in a row have saved nothing, so the job ends; make the script again" \
            "with a larger --time or a smaller --signal-seconds"
        exit 1
    fi
    say "the job goes back into the queue"
    # Slurm's controller may be busy.
    for pause in 0 20 120; do
        sleep "$pause"
        if scontrol requeue "$SLURM_JOB_ID"; then exit 0; fi
    done
    say "Slurm did not take the job back; write: scontrol requeue $SLURM_JOB_ID"
    exit 1
fi
exit "$code"
