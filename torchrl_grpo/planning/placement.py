"""Place the roles on devices. Imports no torch.

:func:`plan` takes a :class:`~torchrl_grpo.planning.request.Request` and the number of GPUs. It returns a
:class:`~torchrl_grpo.planning.plan.Plan`, or raises an error that names a fix. It does not predict memory
(:mod:`~torchrl_grpo.planning.memory`), and does not check whether a script can run the plan
(:mod:`~torchrl_grpo.config.checks.schedule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.planning.plan import Plan, RolePlan, counted, resolved_utilization, show_list, which
from torchrl_grpo.planning.request import Request, Role
from torchrl_grpo.planning.transfer import check_gpus, choose_transfer


def plan(request: Request, num_gpus: int) -> Plan:
    """Place the three roles.

    GPUs are allocated to the roles train, inference and reference in this order, so that no two roles share a
    GPU. If no GPU is left, engines and a reference without a configured number share all GPUs of the trainer.
    Any other role with a single device shares the trainer's first GPU.

    Args:
        request: devices requested for each role.
        num_gpus: number of GPUs of this machine; with 0, every role runs on the CPU.

    Raises:
        ConfigError: there are too few GPUs, two lists of GPUs overlap, or a list names a GPU that does not
            exist.
    """
    return _plan_cpu(request) if num_gpus == 0 else _Allocator(request, num_gpus).plan()


def _plan_cpu(request: Request) -> Plan:
    ranks, engines = request.train.count, request.inference.count
    for name, gpu in request.reward_gpus:
        key = f"reward.args.{name}.device"
        raise bad_value(key, f"cuda:{gpu}", "no GPU can be used here", f"{key}=cpu")
    for role in _named_here(request):
        key = f"{role.key}.devices"
        wrong = f"no GPU can be used here; {role.key}.num_devices alone is a number of processes then"
        raise bad_value(key, list(role.devices or ()), wrong, f"{key}=null")
    if engines % request.engine_size:
        raise _not_a_multiple(request, engines)
    why = "no GPU to use"
    train = RolePlan(
        ("cpu",) * ranks, "separate", why if ranks == 1 else f"{why}: {ranks} ranks, a process each"
    )
    own_process = request.needs_processes
    if own_process:
        inference = _workers(request, ("cpu",) * engines, "process")
    elif request.ranks_generate:
        inference = _in_each_rank(request, train.devices)
    else:
        inference = RolePlan(("cpu",), "colocated", "in the trainer's process")
    reference = _not_loaded(request, train)
    # On a CPU there are no devices to divide, so a requested number is a number of processes.
    own = request.reference.num_devices if request.reference_in_own_processes else None
    if reference is None and own is not None:
        reference = _reference_actors(request, ("cpu",) * own, "")
    elif reference is None:
        where = "in the trainer's process"
        if max(ranks, request.ranks) > 1:
            where = "a copy in each rank" if _may_copy(request) else "in the first rank's process"
        reference = RolePlan(train.devices[: ranks if _may_copy(request) else 1], "colocated", where)
    train = _mark_colocated(train, inference, reference)
    transfer, _ = choose_transfer(request, own_process, on_gpu=False)
    check_gpus(transfer, request.engine, [], [])
    return Plan(
        train,
        replace(inference, own_process=own_process),
        reference,
        0,
        _sleeps(request, own_process, automatic=False),
        request.asynchronous,
        request.ranks_generate,
        resolved_utilization(request.gpu_memory_utilization, inference, reference),
        request.engine_size,
        transfer,
        _notes(request),
        ranks=request.ranks,
        teaches=request.teaches,
        reference_in_each_rank=_in_ranks(request, train, reference),
    )


def _named_here(request: Request) -> list[Role]:
    """Return the roles with lists that name GPUs of this machine."""
    elsewhere = request.cluster or request.servers
    roles = [request.train, *([] if elsewhere else [request.inference]), request.reference]
    return [role for role in roles if role.devices is not None]


def _not_a_multiple(request: Request, count: int) -> Exception:
    size = request.engine_size
    return bad_value(
        "inference_model.num_devices",
        count,
        f"each engine has {size} devices",
        f"inference_model.num_devices={size}",
    )


def _sleeps(request: Request, own_process: bool, automatic: bool) -> bool:
    if request.sleep and own_process:
        raise bad_value(
            "inference_model.sleep",
            True,
            "the engine has a process of its own here, and only an engine in the trainer's process can sleep",
            "inference_model.sleep=false",
        )
    return automatic if request.sleep is None else request.sleep


def _mark_colocated(train: RolePlan, inference: RolePlan, reference: RolePlan) -> RolePlan:
    """Return the trainer's plan, marked as colocated if another role is on its devices."""
    shared = any(
        other.placement == "colocated" and set(other.devices) & set(train.devices)
        for other in (inference, reference)
    )
    return replace(train, placement="colocated") if shared else train


def _in_each_rank(request: Request, devices: tuple[str, ...]) -> RolePlan:
    ranks = max(request.ranks, len(devices))
    return RolePlan(devices, "colocated", f"an engine in each of {ranks} ranks, which generates its share")


def _workers(request: Request, devices: tuple[str, ...], each: str) -> RolePlan:
    size = request.engine_size
    count = len(devices) // size
    weights = _weights_by(request, on_gpu=each != "process")
    if request.servers:
        why = f"{counted(count, 'server')} of inference_model.servers"
        return RolePlan(("server",) * count, "servers", why + weights)
    if request.cluster:
        why = f"{counted(count, 'worker')}, where ray.address puts them"
        return RolePlan(("ray",) * count, "cluster", why + weights)
    what = "server" if request.engine.has_servers else "worker"
    own = f"one {what}, a {each} of its own" if count == 1 else f"{count} {what}s, a {each} each"
    if size > 1:
        kind = "processes" if each == "process" else "GPUs"
        own = f"{counted(count, what)}, {size} {kind} each"
    return RolePlan(devices, "separate", own + weights)


def _weights_by(request: Request, on_gpu: bool) -> str:
    """Return how engines in processes of their own get weights, in words."""
    way, why_not = choose_transfer(request, own_process=True, on_gpu=on_gpu)
    return f"; weights by {way.replace('_', ' ')}{f' ({why_not})' if why_not else ''}"


def _may_copy(request: Request) -> bool:
    """Return whether each training rank may have a copy of the reference."""
    return request.reference.num_devices != 1 and not request.teaches


def _in_ranks(request: Request, train: RolePlan, reference: RolePlan) -> bool:
    """Return whether each of several training ranks has one."""
    together = reference.placement == "colocated" and set(reference.devices) == set(train.devices)
    return max(request.ranks, len(train.devices)) > 1 and together and _may_copy(request)


def _reference_actors(request: Request, devices: tuple[str, ...], why_prefix: str) -> RolePlan:
    count = len(devices)
    if request.cluster:
        what = f"{counted(count, 'actor')}, where ray.address puts them"
        return RolePlan(("ray",) * count, "cluster", what, own_process=True)
    device = "GPU and process" if devices[0].startswith("cuda:") else "process"
    own = f"a {device} of its own" if count == 1 else f"{count} copies, a {device} each"
    return RolePlan(devices, "separate", f"{why_prefix}{own}", own_process=True)


def _notes(request: Request) -> tuple[str, ...]:
    """Return notes for users: what ``allocation_mode`` means, and requests that the plan does not follow."""
    role = request.reference
    notes = (request.allocation_mode,) if request.allocation_mode else ()
    if request.uses_reference or (role.num_devices is None and role.devices is None):
        return notes
    unused = f"{role.key}.num_devices={role.num_devices}"
    if role.devices is not None:
        unused = f"{role.key}.devices={show_list(role.devices)}"
    return (
        *notes,
        f"{unused} is not used: with policy.kl_coef=0 and no policy.kl_target no reference model is loaded; "
        "to have one, write policy.kl_coef=0.01",
    )


def _not_loaded(request: Request, train: RolePlan) -> RolePlan | None:
    """Return the plan of the reference model if no second model is loaded, or else None."""
    if not request.uses_reference:
        return RolePlan((), "off", "nothing asks for it (policy.kl_coef=0, no policy.kl_target)")
    if request.lora:
        return RolePlan(train.devices, "adapter off", "the trained model without its adapters, no copy")
    return None


class _Allocator:
    """Allocate GPUs to roles; roles that name their GPUs come first."""

    def __init__(self, request: Request, num_gpus: int) -> None:
        self.request, self.num_gpus = request, num_gpus
        # Lists are checked even if no reference model is loaded, because a user may set policy.kl_coef later.
        self.named = _named_here(request)
        for role in self.named:
            self._check_exists(role)
        for index, role in enumerate(self.named):
            for earlier in self.named[:index]:
                self._check_overlap(earlier, role)
        if not request.uses_reference or request.lora:
            self.named = [role for role in self.named if role is not request.reference]
        self._check_rewards()
        self.taken = {gpu for role in self.named for gpu in role.devices or ()}
        self.taken |= {gpu for _, gpu in request.reward_gpus}

    def _check_rewards(self) -> None:
        """Refuse a GPU of a reward model that does not exist, or that a role needs."""
        left = set(range(self.num_gpus))
        others: dict[int, str] = {}
        for name, gpu in self.request.reward_gpus:
            roles = [role.key for role in self.named if gpu in (role.devices or ())]
            left.discard(gpu)
            if gpu >= self.num_gpus:
                wrong = f"this machine has {counted(self.num_gpus, 'GPU')}, numbered from 0"
            elif roles:
                wrong = f"this GPU is also in {roles[0]}.devices"
            elif gpu in others:
                wrong = f"the reward {others[gpu]} has this GPU"
            elif not left:
                wrong = "it leaves no GPU for the trainer"
            else:
                others[gpu] = name
                continue
            key = f"reward.args.{name}.device"
            raise bad_value(key, f"cuda:{gpu}", wrong, f"{key}=cpu")

    def _left(self) -> list[int]:
        return [gpu for gpu in range(self.num_gpus) if gpu not in self.taken]

    def plan(self) -> Plan:
        request = self.request
        gpus = self._take(request.train, [])
        engine = [] if request.cluster or request.servers else self._take(request.inference, gpus)
        in_ranks = request.ranks_generate and engine == gpus
        train = RolePlan(_names(gpus), "separate", self._why_train(gpus))
        # vLLM takes the first GPU that its process sees. For another GPU, the process must see only that one.
        first_only = request.engine.owns_process and not gpus == engine == [0]
        own_process = request.needs_processes or first_only
        inference = self._inference(gpus, engine, own_process)
        shared = inference.placement == "colocated"
        sleeps = _sleeps(
            request, own_process, automatic=shared and not own_process and request.engine.sleeps_on_gpu
        )
        if shared:
            inference = replace(inference, why=f"{inference.why}; {'sleeps' if sleeps else 'stays awake'}")
        reference = _not_loaded(request, train) or self._reference(gpus, engine)
        transfer, _ = choose_transfer(request, own_process, on_gpu=True)
        check_gpus(transfer, request.engine, gpus, engine)
        return Plan(
            _mark_colocated(train, inference, reference),
            replace(inference, own_process=own_process),
            reference,
            self.num_gpus,
            sleeps,
            request.asynchronous,
            in_ranks,
            resolved_utilization(request.gpu_memory_utilization, inference, reference),
            request.engine_size,
            transfer,
            _notes(request),
            ranks=request.ranks,
            teaches=request.teaches,
            reference_in_each_rank=_in_ranks(request, train, reference),
            reward_gpus=request.reward_gpus,
        )

    def _take(self, role: Role, trainer: Sequence[int]) -> list[int]:
        """Return the GPUs of ``role``, which may share the GPUs already allocated to the trainer."""
        if role.devices is not None:
            return list(role.devices)
        left = self._left()
        if len(left) >= role.count:
            free = left[: role.count]
            self.taken.update(free)
            return free
        if role.count > 1:
            raise self._too_few(role, len(left))
        if role is self.request.train and self.num_gpus > 1:
            raise self._none_for_trainer()
        if role is self.request.inference and role.num_devices is None:
            # Place an engine on each GPU of the trainer. With one engine, the other GPUs would idle while it
            # generates and evaluates.
            return list(trainer) or [0]
        return [trainer[0] if trainer else 0]

    def _too_few(self, role: Role, left: int) -> Exception:
        key = f"{role.key}.num_devices"
        here = f"this machine has {counted(self.num_gpus, 'GPU')}"
        size = self.request.engine_size if role is self.request.inference else 1
        if size > 1:
            wrong = (
                f"{here}, of which {left} {'is' if left == 1 else 'are'} left, and each engine takes {size}"
            )
            fewer = f"{key}={left // size * size}" if left >= size else f"{self.request.one_device} {key}=1"
            return bad_value(key, role.count, wrong, fewer)
        if left == self.num_gpus:
            return bad_value(key, role.count, here, f"{key}={left}")
        wrong = f"{here}, and the other roles leave {f'only {left}' if left else 'none'}"
        return bad_value(key, role.count, wrong, f"{key}={left or 'auto'}")

    def _none_for_trainer(self) -> Exception:
        role = max(self.named, key=lambda candidate: candidate.count)
        fewer = (role.devices or ())[1:]
        return bad_value(
            f"{role.key}.devices",
            list(role.devices or ()),
            f"it leaves none of this machine's {self.num_gpus} GPUs for the trainer",
            f"{role.key}.devices={show_list(fewer) if fewer else 'null'}",
        )

    def _why_train(self, gpus: Sequence[int]) -> str:
        if self.request.train.devices is not None:
            return "as train_model.devices says"
        num_devices = self.request.train.num_devices
        shown = "auto" if num_devices is None else str(num_devices)
        return f"train_model.num_devices={shown}: {which(gpus)}"

    def _inference(self, trainer: list[int], gpus: list[int], own_process: bool) -> RolePlan:
        request = self.request
        if request.cluster or request.servers:
            # Only their number is used.
            return _workers(request, ("elsewhere",) * request.inference.count, "")
        if request.ranks_generate and gpus == trainer:
            return _in_each_rank(request, _names(gpus))
        shared = bool(set(gpus) & set(trainer))
        why_prefix = "as inference_model.devices says: " if request.inference.devices is not None else ""
        if shared:
            one_gpu = "one GPU" if self.num_gpus == 1 else "no GPU left"
            kind = "server" if request.engine.has_servers else "worker"
            engines = len(gpus) // request.engine_size
            each = f", {engines} {kind}s" if engines > 1 and not why_prefix else ""
            if request.engine_size > 1:
                each = f", {counted(engines, kind)} with {request.engine_size} GPUs each"
            why = f"{why_prefix or f'{one_gpu}: '}shares the trainer's{each}"
            if own_process:
                why += _weights_by(request, on_gpu=True)
            return RolePlan(_names(gpus), "colocated", why)
        if own_process:
            workers = _workers(request, _names(gpus), "GPU")
            return replace(workers, why=why_prefix + workers.why)
        return RolePlan(_names(gpus), "separate", f"{why_prefix}a GPU of its own")

    def _reference(self, trainer: list[int], engine: list[int]) -> RolePlan:
        request = self.request
        number, named = request.reference.num_devices, request.reference.devices is not None
        if request.cluster and request.reference_in_own_processes and number is not None and not named:
            return _reference_actors(request, ("ray",) * number, "")
        if request.cluster and request.reference.count == 1 and not named:
            why = "ray.address: which other GPUs are free is not known here; shares the trainer's"
            return RolePlan(_names(self._of_ranks(trainer)), "colocated", why)
        gpus = self._take(request.reference, trainer)
        why_prefix = f"as {request.reference.key}.devices says: " if named else ""
        one_gpu = "one GPU" if self.num_gpus == 1 else "no GPU left"
        if set(gpus) & set(trainer):
            gpus = gpus if named else self._of_ranks(trainer)
            return RolePlan(_names(gpus), "colocated", f"{why_prefix or f'{one_gpu}: '}shares the trainer's")
        if set(gpus) & set(engine):
            return RolePlan(_names(gpus), "colocated", f"{why_prefix}shares the engine's")
        # On a Ray cluster, Ray chooses the GPUs of other processes. So only the trainer's own process can
        # score on the GPUs that the configuration names.
        if request.reference_in_own_processes and not request.cluster:
            return _reference_actors(request, _names(gpus), why_prefix)
        own = "a GPU of its own" if len(gpus) == 1 else f"{len(gpus)} GPUs of its own"
        return RolePlan(_names(gpus), "separate", why_prefix + own)

    def _of_ranks(self, trainer: list[int]) -> list[int]:
        """Return the trainer's GPUs that a reference model shares: all, unless one is asked for.

        A teacher is in the first rank's process.
        """
        return trainer if _may_copy(self.request) else trainer[:1]

    def _check_exists(self, role: Role) -> None:
        devices = role.devices or ()
        if max(devices) < self.num_gpus:
            return
        here = f"this machine has {counted(self.num_gpus, 'GPU')}, numbered from 0"
        raise bad_value(f"{role.key}.devices", list(devices), here, self._others_for(role))

    def _check_overlap(self, earlier: Role, role: Role) -> None:
        before, now = set(earlier.devices or ()), set(role.devices or ())
        shared = before & now
        if not shared:
            return
        wrong = f"GPU {min(shared)} is also in {earlier.key}.devices={show_list(earlier.devices or ())}"
        trainer_and_engines = {earlier.key, role.key} == {"train_model", "inference_model"}
        # Engines of several GPUs may take more than the trainer.
        wider = trainer_and_engines and self.request.engine_size > 1 and before < now
        together = before == now or wider
        workers = trainer_and_engines and self.request.asynchronous
        if together and not (workers and self.num_gpus > 1):
            return
        if together:
            wrong += ", and workers of grpo-async.py generate while the trainer trains"
        else:
            wrong += ", and two roles share all of their GPUs or none"
        raise bad_value(f"{role.key}.devices", list(role.devices or ()), wrong, self._others_for(role))

    def _others_for(self, role: Role) -> str:
        """Return the fix for an invalid list: as many GPUs that no other list names, or null."""
        named = {gpu for other in self.named if other is not role for gpu in other.devices or ()}
        free = [gpu for gpu in range(self.num_gpus) if gpu not in named][: role.count]
        return f"{role.key}.devices={show_list(free) if len(free) == role.count else 'null'}"


def _names(gpus: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"cuda:{gpu}" for gpu in gpus)
