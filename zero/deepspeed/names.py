"""Names of DeepSpeed that do not exist here, each with the alternative, which the AttributeError shows.

A name may contain "*". `docs/deepspeed.md` lists them (a test compares the two). `SWITCHED_OFF` has functions that
always return False, because the feature does not exist here.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

_SENDS = "the optimizer sends gradients during backward and step()"
_NO_EXPERTS = "there are no experts"
_PLAN = "see onebit.zero.plan"
_CONFIG = "ask engine.config"
_COMPILE = "compile the model with torch.compile before initialize()"
_STATES = '"offload_optimizer" keeps states in host memory for the whole run'
_OWN_FILES = "files are written by engine.save_checkpoint alone"

SWITCHED_OFF = frozenset({
    "amp_enabled", "autotuning_enabled", "eigenvalue_enabled",
    "graph_harvesting", "memory_breakdown", "sparse_gradients_enabled",
    "super_offload", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "zero_quantized_weights", "zero_grad_hooks", "zero_legacy_stage1",
    "is_compiled", "is_deepcompile_enabled", "is_deepcompile_active", "load_universal_checkpoint",
    "use_node_local_storage", "bf16_optimizer_states", "bf16_master_weights_and_gradients",
    "fp16_master_weights_and_gradients",
})  # fmt: skip
"""Features that do not exist here: the engine has a function of each of these names, which returns False."""

ENGINE: Mapping[str, str] = {
    "allreduce_gradients": f"{_SENDS}; accumulate in engine.no_sync()",
    "allreduce_*": _SENDS,
    "all_gather_scalar": "use onebit.zero.comm",
    "buffered_allreduce_fallback": _SENDS,
    "sparse_*": "gradients are dense: nn.Embedding(..., sparse=False)",
    "coalesce_grad_reduction": f"{_SENDS}; accumulate in engine.no_sync()",
    "collect_python_gc": "call gc.collect() in the script",
    "clip_fp32_gradients": '"gradient_clipping" clips in step()',
    "scale": "call engine.backward(loss), which scales it",
    "managed_gradient_accumulation": "engine.step() counts; see set_gradient_accumulation_boundary()",
    "postscale_gradients": "gradients are averaged in float32",
    "gradient_predivide_factor": "gradients are averaged in float32",
    "gradient_average": "gradients are averaged",
    "enable_backward_allreduce": _SENDS,
    "enable_allreduce": _SENDS,
    "disable_allreduce": f"{_SENDS}; accumulate in engine.no_sync()",
    "enable_need_reduction": _SENDS,
    "disable_need_reduction": f"{_SENDS}; accumulate in engine.no_sync()",
    "communication_data_type": "it is engine.config.communication_data_type, a string",
    "set_train_micro_batch_size": "the loader's batches are of this size; make another with engine.deepspeed_io()",
    "set_batch_fn": "map over the iterator that train_batch() takes",
    "random_ltd_initialize": "initialize() does it",
    "pld_*": "it is engine.config.progressive_layer_drop",
    "progressive_layer_drop": "it is engine.config.progressive_layer_drop",
    "eigenvalue*": "there are no eigenvalues",
    "block_eigenvalue": "there are no eigenvalues",
    "quantize*": "there is no quantized training",
    "amp_params": 'there is no apex; write "fp16" or "bf16"',
    "torch_autocast_*": 'write "fp16" or "bf16"',
    "flops": '"flops_profiler" logs them',
    "flops_profiler": "it is in engine.active_features",
    "flops_profiler_*": "it is in engine.config.flops_profiler",
    "autotuning_*": _PLAN,
    "tensor_parallel_config": "it is engine.config.onebit.tensor",
    "autotp_size": "it is engine.config.onebit.tensor",
    "aio_config": "files are read and written in chunks, by threads",
    "swap_tensor_config": "files are read and written in chunks, by threads",
    "zenflow_config": "there is one form of offload",
    "cpuadam_cores_perc": "threads are torch's",
    "zero_use_cpu_optimizer": "ask engine.zero_cpu_offload()",
    "zero_*": _CONFIG,
    "zeropp_loco_param": "there are no quantized gradients; take a one-bit optimizer",
    "mics_shard_size": "it is engine.config.zero_optimization.mics_shard_size",
    "is_sanity_checks_enabled": '"onebit": {"check_replicas_every"} compares replicas',
    "is_first_weights_partition_group": "ask engine.grid.coordinates",
    "is_elastic_model_parallel_supported": "ask engine.config.elasticity; checkpoints load into any number of ranks",
    "checkpoint_*": "checkpoints are torch.distributed.checkpoint's, named by their step or tag",
    "loaded_checkpoint_*": "a checkpoint loads into any layout",
    "fp16_auto_cast": "floating-point inputs are always cast to the type computed in",
    "optimizer_legacy_fusion": "there is one form of the step",
    "dynamic_loss_scale_args": "it is engine.config.fp16",
    "log_level": "configure Python's logging of `onebit`",
    "compile_*": _COMPILE,
    "uses_parallelization_pass_only": _COMPILE,
    "get_compile_time": _COMPILE,
    "get_deep*": _COMPILE,
    "get_autosp_backend": _COMPILE,
    "get_autotp_backend": _COMPILE,
    "register_compile_pass": _COMPILE,
    "offload_states": _STATES,
    "reload_states": _STATES,
    "print_forward_breakdown": "see wall_clock_breakdown",
    "get_wall_clock_timers": "see wall_clock_breakdown",
    "expert_*": _NO_EXPERTS,
    "has_moe_layers": _NO_EXPERTS,
    "num_experts": _NO_EXPERTS,
    "moe_layers": _NO_EXPERTS,
    "gate_modules": _NO_EXPERTS,
    "load_moe_state_dict": _NO_EXPERTS,
    "all_to_all_group": _NO_EXPERTS,
    "local_all_to_all_group": _NO_EXPERTS,
    "save_zero_checkpoint": _OWN_FILES,
    "save_non_zero_checkpoint": _OWN_FILES,
    "checkpoint_engine": _OWN_FILES,
    "basic_optimizer": "it is engine.optimizer",
    "client_optimizer": "it is engine.optimizer",
    "client_lr_scheduler": "it is engine.lr_scheduler",
    "monitor": '"tensorboard", "csv_monitor", "wandb" and "comet" write scalars',
    "summary_writer": '"tensorboard" writes scalars',
    "summary_events": '"tensorboard" writes scalars',
    "*timer*": "see wall_clock_breakdown",
    "is_map_style_dataset": "datasets have a length and items",
    "is_iterable_style_dataset": "datasets have a length and items",
    "losses": "keep what engine.backward(loss) gives",
    "pipeline_parallelism": "ask engine.is_pipe_parallel",
    "param_names": "ask engine.module.named_parameters()",
    "mesh_device": "it is engine.grid.mesh",
    "dont_change_device": "the model is moved to engine.device",
    "flatten": "nothing here is flat",
    "unflatten": "nothing here is flat",
    "first_dataloader_check": "it is DeepSpeed's own",
    "fwd_duration": "see wall_clock_breakdown",
    "gas_boundary_ctr": "it is engine.micro_steps_of_step",
    "inside_no_sync_ctxt": "it is DeepSpeed's own",
    "module_forward_*_hook": "it is DeepSpeed's own",
    "optimized_linear_*": "there are no adapters of its own; any module is trained",
    "scale_wrt_gas": "it is an argument of engine.backward",
    "sparse_tensor_module_names": "gradients are dense",
    "torch_autocast_z0_gradscaler": 'write "fp16" or "bf16"',
    "use_ds_comm": "it is DeepSpeed's own",
    "warn_unscaled_loss": "it is DeepSpeed's own",
    "training_data": "it is engine.loader.dataset",
    "collate_fn": "it is an argument of initialize()",
    "get_additional_losses": "return what loss_fn gives beside the loss through a hook of your own",
    "log_for_device": "use onebit.zero.log_dist",
    "set_has_attention_mask": "what a layer gives to the next are tensors in a tuple, masks among them",
    "tput_log": "see wall_clock_breakdown",
}
"""Names of the engine."""

_DTYPE = 'the configuration says what is computed in, as {"bf16": {"enabled": true}}; masters are float32'

REFUSED: Mapping[str, str] = {
    "half": _DTYPE,
    "bfloat16": _DTYPE,
    "float": _DTYPE,
    "double": _DTYPE,
    "type": _DTYPE,
    "compile": _COMPILE,
    "to_empty": "the module has its weights",
    "share_memory": "other processes have their own engines",
}
"""Methods of a module that an engine must not run: calling one raises RuntimeError."""

MODULE: Mapping[str, str] = {
    "DeepSpeedInferenceConfig": "onebit.zero.InferenceConfig holds the keys of init_inference",
    "default_inference_config": "onebit.zero.InferenceConfig() holds the defaults of init_inference",
    "DeepSpeedHybridEngine": "init_inference(engine) shares its weights where they are whole and keep their type",
    "PipelineEngine": "initialize(model=PipelineModule(...)) gives an engine with train_batch() and eval_batch()",
    "DeepSpeedConfig": "onebit.zero.read_config(file, world_size=...) gives a Config",
    "DeepSpeedConfigError": "what is wrong with a configuration is a ValueError or TypeError",
    "DeepSpeedOptimizer": "optimizers are torch's",
    "DeepSpeedDataLoader": "engine.deepspeed_io() and initialize(training_data=...) give a loader",
    "DeepSpeedTransformerLayer": "there are no fused layers; write torch's",
    "DeepSpeedTransformerConfig": "there are no fused layers; write torch's",
    "replace_transformer_layer": "there are no fused layers; write torch's",
    "revert_transformer_layer": "there are no fused layers; write torch's",
    "module_inject": "there are no fused layers; write torch's",
    "set_autotp_mode": 'pass initialize(tensor_plan=...), and "onebit": {"tensor": ...}',
    "DualPipeVEngine": 'take PipelineModule, and "pipeline": {"schedule": "zbv"}, which places stages the same way',
    "DualPipeVModule": 'take PipelineModule, and "pipeline": {"schedule": "zbv"}, which places stages the same way',
    "resolve_per_head_muon_after_sharding": "Muon orthogonalises whole matrices",
    "domino": "there is no Domino",
    "sequence": '"sequence_parallel_size", or onebit.zero.sequence_parallel, splits sequences by ring attention',
    "autotuning": _PLAN,
    "profiling": '"flops_profiler" counts a pass; or use torch.utils.flop_counter, torch.profiler',
    "monitor": '"tensorboard", "csv_monitor", "wandb" and "comet" of a configuration write scalars',
    "OnDevice": "build on torch.device('meta') or as usual: initialize() shards what it is given",
    "add_tuning_arguments": "write the schedule into the configuration",
    "is_compile_supported": _COMPILE,
    "DeepSpeedOptimizerCallable": "any function of parameters makes an optimizer",
    "DeepSpeedSchedulerCallable": "any function of an optimizer makes a schedule",
    "git_branch": "it is onebit.zero.__version__",
    "git_hash": "it is onebit.zero.__version__",
    "version": "it is onebit.zero.__version__",
    "load_ds_config": "onebit.zero.read_config(file, world_size=...) gives a Config",
    "merge_tp_model_init_into_config": "it is DeepSpeed's own",
    "record_tp_model_init_args": "it is DeepSpeed's own",
    "set_optimizer_flags": "it is DeepSpeed's own",
    "dist": "it is onebit.zero.comm",
}
"""Names of the module `deepspeed`."""


def why_not(name: str, names: Mapping[str, str]) -> str | None:
    """The alternative for a name that does not exist here; None if DeepSpeed has no such name, either."""
    if name in names:
        return names[name]
    return next((why for pattern, why in names.items() if "*" in pattern and fnmatchcase(name, pattern)), None)
