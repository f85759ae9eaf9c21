"""Keys that DeepSpeed documents and that have no effect here, each with the reason for the warning.

Some are refused instead, if ignoring them would train another model, or average other tensors, than the file asks for.
Source: DeepSpeed's "Configuration JSON" page, and for keys missing there the constants of its 0.19 releases.
"""

from __future__ import annotations

from collections.abc import Mapping

from .schema import ANYTHING, BOOL, FLOAT, INT, LIST, OBJECT, TEXT, Inert

_COMMENTS = {"comment", "comments", "description", "note", "notes", "$schema"}


def is_comment(name: str) -> bool:
    """Whether a key is a note to readers: JSON has no other comments, and public files contain many."""
    return name.startswith(("_", "//", "#")) or name.lower() in _COMMENTS


_LAUNCHER = "the launcher sets it"
_DOTTED = 'it belongs in the block "zero_optimization", under the name after the dot'
FOREIGN = {
    "comms_config": "bytes and waits of each step are in the one-bit optimizers' stats",
    "cuda_visible_devices": "set CUDA_VISIBLE_DEVICES in the environment",
    "deepspeed_hostfile": _LAUNCHER,
    "deepspeed_multinode_launcher": _LAUNCHER,
    "deepspeed_inclusion_filter": _LAUNCHER,
    "deepspeed_exclusion_filter": _LAUNCHER,
    "distributed_type": _LAUNCHER,
    "fp32_allreduce": 'write "communication_data_type": "fp32"',
    "local_rank": _LAUNCHER,
    "monitor_config": "write its blocks at the top level: tensorboard, csv_monitor, wandb, comet",
    "mpi_launcher": _LAUNCHER,
    "num_gpus": _LAUNCHER,
    "num_nodes": _LAUNCHER,
    "zero3_init_flag": "parameters are sharded by initialize()",
    # TRL writes these for reference models.
    "zero_optimization.reduce_bucket_size": _DOTTED,
    "zero_optimization.stage3_param_persistence_threshold": _DOTTED,
    "zero_optimization.stage3_prefetch_bucket_size": _DOTTED,
}
"""Top-level keys of public files that DeepSpeed does not know either: it ignores them silently."""

_BUCKETS = 'buckets are of one size, "onebit": {"bucket_cap_mb": ...}'
_FSDP = "FSDP2 gathers and frees parameters module by module, and prefetches the next one"
_FILES = "files are read ahead and written in the background, in chunks, by threads"
_PIECES = "parameters are read in pieces of a chunk's size, buffer_count of them; nothing else of them is in memory"
_MEAN = "gradients are summed in float32, which neither overflows nor needs a factor"
_FINITE = "gradients that are not finite are always noticed, and the step skipped"
_SEQUENCE = 'the format of keys and values is "onebit": {"sequence": {"codec": ...}}; their gradients travel in float32'

FP16 = {
    "auto_cast": Inert(BOOL, "floating-point inputs are always cast to the type computed in", fine=(True,)),
    "fp16_master_weights_and_grads": Inert(BOOL, "master weights are float32", fine=(False,)),
    "fused_mode": Inert(BOOL, "there is one form of the step"),
    "fp16_opt_level": Inert(TEXT, "there is one form of mixed precision"),
    "opt_level": Inert(TEXT, "there is one form of mixed precision"),
    "fp16_scale_tolerance": Inert(FLOAT, "every step whose gradients are not finite lowers the scale"),
}

_ALL_MESSAGES = "all operations of the backend are listed"
COMMS_LOGGER = {
    "prof_all": Inert(BOOL, _ALL_MESSAGES, fine=(True,)),
    "prof_ops": Inert(LIST, _ALL_MESSAGES, fine=([],)),
    "debug": Inert(BOOL, "callers are not named; see torch.profiler with with_stack", fine=(False,)),
}

_SCALED = "bfloat16 has float32's range and needs no loss scale"

BF16 = {
    **{name: Inert(FLOAT, _SCALED) for name in ("loss_scale", "min_loss_scale", "initial_scale_power")},
    **{name: Inert(INT, _SCALED) for name in ("loss_scale_window", "hysteresis")},
    "immediate_grad_update": Inert(BOOL, "gradients are summed where autograd leaves them"),
    "bf16_master_weights_and_grads": Inert(BOOL, "master weights are float32", fine=(False,)),
    "bf16_optimizer_states": Inert(
        BOOL, 'moments are float32; "onebit": {"error_dtype": "bf16"} halves the errors', fine=(False,)
    ),
    "check_overflow": Inert(BOOL, _FINITE, fine=(True,)),
    "check_grad_overflow": Inert(BOOL, _FINITE, fine=(True,)),
}

ACTIVATIONS = {
    "contiguous_memory_optimization": Inert(BOOL, "torch's allocator places activations", fine=(False,)),
    "number_checkpoints": Inert(INT, "checkpoints are as many as the model has"),
    "synchronize_checkpoint_boundary": Inert(BOOL, "nothing waits at a checkpoint", fine=(False,)),
    "profile": Inert(BOOL, "see wall_clock_breakdown", fine=(False,)),
}

PIPELINE = {
    "seed_layers": Inert(BOOL, "a layer's initial values depend on its place alone", fine=(True,)),
    "pipe_partitioned": Inert(BOOL, "activations travel whole", fine=(False,)),
    "grad_partitioned": Inert(BOOL, "activation gradients travel whole", fine=(False,)),
    "use_reentrant": Inert(BOOL, "activation checkpoints are non-reentrant", fine=(False,)),
}

DATA_TYPES = {
    "grad_type": Inert(TEXT, "gradients are float32, or, sharded across nodes, of the type computed in"),
    "param_dtype": Inert(TEXT, 'parameters are of the type computed in, which "bf16" and "fp16" choose'),
    "buffer_dtype": Inert(TEXT, "buffers keep their types; cast them before initialize()", refused=True),
    "keep_in_fp32_modules": Inert(ANYTHING, "buffers of checkpoints all stay in float32", fine=("auto",)),
}

OFFLOAD = {
    "fast_init": Inert(BOOL, "files are reserved, not written, when a run begins", fine=(True, False)),
    "pipeline": Inert(BOOL, _FILES, fine=(True,)),
    "pipeline_read": Inert(BOOL, _FILES, fine=(True,)),
    "pipeline_write": Inert(BOOL, _FILES, fine=(True,)),
    "super_offload": Inert(BOOL, "there is one form of offload", fine=(False,)),
    "convert_grad_on_cpu": Inert(BOOL, "gradients arrive as float32"),
    "cpuadam_cores_perc": Inert(FLOAT, "threads are torch's: torch.set_num_threads"),
}
OFFLOAD_PARAM = {
    "buffer_size": Inert(INT, _PIECES),
    "max_in_cpu": Inert(INT, _PIECES),
}

ZERO = {
    "reduce_bucket_size": Inert(INT, _BUCKETS),
    "allgather_bucket_size": Inert(INT, _BUCKETS),
    "allgather_partitions": Inert(BOOL, "partitions are always gathered", fine=(True,)),
    "reduce_scatter": Inert(BOOL, "each rank always reduces its own chunk", fine=(True,)),
    "contiguous_gradients": Inert(BOOL, "buckets are flat, gradients stay where they are"),
    "round_robin_gradients": Inert(BOOL, "how shards are cut is fixed", fine=(False,)),
    "use_multi_rank_bucket_allreduce": Inert(BOOL, _BUCKETS),
    "compute_grad_norm": Inert(BOOL, "the norm is computed if gradient_clipping needs it"),
    "parameter_alignment": Inert(BOOL, "each parameter is padded to whole blocks", fine=(True,)),
    "ignore_unused_parameters": Inert(BOOL, "a parameter without a gradient is left alone", fine=(True,)),
    "load_from_fp32_weights": Inert(BOOL, "master weights are in the checkpoint", fine=(True,)),
    "elastic_checkpoint": Inert(BOOL, "every checkpoint loads into any number of replicas", fine=(True,)),
    "legacy_stage1": Inert(BOOL, "there is one stage 1", fine=(False,)),
    "pipeline_loading_checkpoint": Inert(BOOL, "checkpoints are read shard by shard", fine=(False,)),
    "sub_group_size": Inert(INT, "the step is taken whole; " + _BUCKETS),
    "stage3_max_live_parameters": Inert(INT, _FSDP),
    "stage3_max_reuse_distance": Inert(INT, _FSDP),
    "stage3_prefetch_bucket_size": Inert(INT, _FSDP),
    "stage3_param_persistence_threshold": Inert(INT, _FSDP),
    "stage3_model_persistence_threshold": Inert(INT, _FSDP),
    "stage3_module_granularity_threshold": Inert(INT, _FSDP),
    "stage3_use_all_reduce_for_fetch_params": Inert(BOOL, _FSDP, fine=(False,)),
    "stage3_allgather_sequential": Inert(BOOL, _FSDP, fine=(False,)),
    "stage3_partition_stream_chunk_size": Inert(INT, _FSDP, fine=(0,)),
    "mics_hierarchical_params_gather": Inert(BOOL, _FSDP, fine=(False,)),
    "memory_efficient_linear": Inert(BOOL, _FSDP),
    "override_module_apply": Inert(BOOL, "modules are built before they are sharded"),
    "zero_quantized_weights": Inert(BOOL, "parameters are gathered in the type computed in", fine=(False,)),
    "zero_quantized_nontrainable_weights": Inert(
        BOOL, "frozen parameters are gathered as the others are", fine=(False,)
    ),
    "zero_quantized_gradients": Inert(BOOL, "choose a one-bit optimizer, which sends less", fine=(False,)),
    "zeropp_loco_param": Inert({"err_beta": FLOAT, "reset_T": INT}, "choose a one-bit optimizer, which sends less"),
    "zenflow": Inert(OBJECT, "there is one form of offload"),
    "log_trace_cache_warnings": Inert(BOOL, "there is no trace cache", fine=(False,)),
    "enable_sanity_checks": Inert(BOOL, '"onebit": {"check_replicas_every": ...} compares the replicas', (False,)),
    "save_muon_momentum_buffer_in_memory": Inert(BOOL, "moments are where the optimizer's state is"),
    "cpu_offload_use_pin_memory": Inert(BOOL, 'write it as "pin_memory" of offload_optimizer'),
}


def _is_tensor_parallel(given: object) -> bool:
    """Whether a "tensor_parallel" block divides the model itself; `compat.py` has removed its autotp_size."""
    size = given.get("tp_size") if isinstance(given, Mapping) else None
    return isinstance(size, int) and size > 1


_SWITCH: dict[str, object] = {"enabled": BOOL}
_AUTOTUNING = _SWITCH | {
    "results_dir": TEXT,
    "exps_dir": TEXT,
    "overwrite": BOOL,
    "metric": TEXT,
    "start_profile_step": INT,
    "start_step": INT,
    "end_profile_step": INT,
    "end_step": INT,
    "fast": BOOL,
    "max_train_batch_size": INT,
    "min_train_batch_size": INT,
    "max_train_micro_batch_size_per_gpu": INT,
    "min_train_micro_batch_size_per_gpu": INT,
    "mp_size": INT,
    "num_tuning_micro_batch_sizes": INT,
    "tuner_type": TEXT,
    "tuner_early_stopping": INT,
    "tuner_num_trials": INT,
    "arg_mappings": OBJECT,
    "model_info": OBJECT,
}
_AIO = {
    "block_size": INT,
    "queue_depth": INT,
    "thread_count": INT,
    "intra_op_parallelism": INT,
    "single_submit": BOOL,
    "overlap_events": BOOL,
    "use_gds": BOOL,
}
_TENSOR_PARALLEL = {
    "autotp_size": INT,
    "tp_size": INT,
    "tp_grain_size": INT,
    "preset_model": TEXT,
    "tp_overlap_comm": BOOL,
    "vocab_parallel_lm_head": BOOL,
    "vocab_parallel_ce_backend": TEXT,
    "partition_config": OBJECT,
}
_HYBRID = _SWITCH | {
    "max_out_tokens": INT,
    "inference_tp_size": INT,
    "release_inference_cache": BOOL,
    "pin_parameters": BOOL,
    "tp_gather_partition_size": INT,
    "enable_cuda_graph": BOOL,
}
_EIGENVALUE = _SWITCH | {
    "verbose": BOOL,
    "max_iter": INT,
    "tol": FLOAT,
    "stability": FLOAT,
    "gas_boundary_resolution": INT,
    "layer_name": TEXT,
    "layer_num": INT,
}
_CHECKPOINT = {
    "tag_validation": TEXT,
    "load_universal": BOOL,
    "use_node_local_storage": BOOL,
    "parallel_write": {"pipeline_stage": BOOL},
    "writer": OBJECT,
}
_COMPILE = {
    "enabled": BOOL,
    "disable": BOOL,
    "backend": TEXT,
    "kwargs": OBJECT,
    "deepcompile": BOOL,
    "passes": LIST,
    "offload_activation": BOOL,
    "offload_activation_pin_memory": BOOL,
    "free_activation": BOOL,
    "free_activation_threshold": INT,
    "offload_opt_states": BOOL,
    "offload_parameters": BOOL,
    "double_buffer": BOOL,
    "symmetric_memory": BOOL,
    "debug_log": BOOL,
    "sync_before_reduce": BOOL,
    "sync_after_reduce": BOOL,
    "sync_before_allgather": BOOL,
    "sync_after_allgather": BOOL,
    "keep_int_input_tensors": BOOL,
    "keep_all_input_tensors": BOOL,
    "autoep_non_moe": BOOL,
}
_MONITOR = "monitors here: tensorboard, csv_monitor, wandb and comet"

TOP_LEVEL = {
    "prescale_gradients": Inert(BOOL, _MEAN, fine=(False,)),
    "gradient_predivide_factor": Inert(FLOAT, _MEAN, fine=(1.0,)),
    "gradient_allreduce_op": Inert(TEXT, "gradients are averaged", fine=("mean",), refused=True),
    "seq_parallel_communication_data_type": Inert(TEXT, _SEQUENCE),
    "seq_parallel_comm_data_type": Inert(TEXT, _SEQUENCE),
    "managed_gradient_accumulation": Inert(BOOL, "engine.step() counts the micro-batches", fine=(True,), refused=True),
    "zero_allow_untested_optimizer": Inert(BOOL, "any optimizer is taken", fine=(True, False)),
    "zero_force_ds_cpu_optimizer": Inert(BOOL, "offloaded state is stepped by one optimizer", fine=(True, False)),
    "autotuning": Inert(_AUTOTUNING, "see `onebit plan`"),
    "aio": Inert(_AIO, _FILES),
    "trackio": Inert(_SWITCH | {"project": TEXT}, _MONITOR),
    "checkpoint": Inert(
        _CHECKPOINT, "checkpoints are named by their step, sharded, and load into any number of replicas"
    ),
    "nebula": Inert(OBJECT, "checkpoints are written by torch.distributed.checkpoint"),
    "compile": Inert(_COMPILE, "compile the model with torch.compile before initialize()"),
    "memory_breakdown": Inert(BOOL, "see `onebit plan`", fine=(False,)),
    "disable_allgather": Inert(BOOL, "partitions are always gathered", fine=(False,)),
    "sparse_gradients": Inert(BOOL, "use dense gradients: nn.Embedding(..., sparse=False)", (False,), refused=True),
    "graph_harvesting": Inert(BOOL, "there are no captured graphs", fine=(False,)),
    "disable_python_gc": Inert(BOOL, "call gc.disable() in the script", fine=(False,)),
    "vocabulary_size": Inert(INT, "nothing here depends on it"),
    "data_parallel_size": Inert(INT, "the ranks that do not share a model divide the data"),
    "use_data_before_expert_parallelism": Inert(BOOL, "there is no expert parallelism", fine=(False,)),
    "log_level": Inert(TEXT, "configure Python's logging of `onebit`"),
    "timers": Inert(OBJECT, "see wall_clock_breakdown"),
    "amp": Inert(_SWITCH | {"opt_level": TEXT, "loss_scale": ANYTHING}, 'write "fp16" or "bf16"', refused=True),
    "tensor_parallel": Inert(
        _TENSOR_PARALLEL,
        'write "autotp_size", or "onebit": {"tensor": ...}; initialize(tensor_plan=...) has the plan',
        refused=True,
        asks=_is_tensor_parallel,
    ),
    "expert_parallel": Inert(OBJECT, "there is no expert parallelism", refused=True),
    "hybrid_engine": Inert(_HYBRID, "the model's own generate() runs, on the weights that are trained"),
    "eigenvalue": Inert(_EIGENVALUE, "only quantize_training used it: leave the block out", refused=True),
    "quantize_training": Inert(OBJECT, 'write "compression_training" with "weight_quantization"', refused=True),
}
