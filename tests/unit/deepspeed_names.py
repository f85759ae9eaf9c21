"""Public names of DeepSpeed 0.19.6 (edaa722), and those that 0.19.8 adds, of its engine and its module.

Of the engine: methods of DeepSpeedEngine and attributes that it sets, methods of PipelineEngine beside these. Then the
arguments of functions that are here, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator


def names_in(text: str) -> list[str]:
    """Its words."""
    return re.findall(r"\w+", text)


ENGINE = names_in(
    """
    aio_config all_gather_scalar all_to_all_group allreduce_and_copy allreduce_bucket allreduce_gradients
    allreduce_no_retain amp_enabled amp_params autotp_size autotuning_enabled autotuning_end_profile_step
    autotuning_metric autotuning_metric_path autotuning_model_info autotuning_model_info_path
    autotuning_profile_model_info autotuning_start_profile_step backward basic_optimizer
    bf16_master_weights_and_gradients bf16_optimizer_states bfloat16_enabled block_eigenvalue
    buffered_allreduce_fallback checkpoint_engine checkpoint_mp_rank checkpoint_serialization_enabled
    checkpoint_tag_validation_enabled checkpoint_tag_validation_fail checkpoint_writer_enabled client_lr_scheduler
    client_optimizer clip_fp32_gradients coalesce_grad_reduction collate_fn collect_python_gc
    communication_data_type compile compile_autosp compile_autotp compile_zero_optimization_stage
    compression_scheduler config cpuadam_cores_perc curriculum_enabled_legacy curriculum_learning_config
    curriculum_learning_enabled curriculum_params_legacy curriculum_scheduler_legacy data_efficiency_config
    data_efficiency_enabled data_parallel_group data_sampling_config data_sampling_enabled dataloader_drop_last
    deepspeed_io destroy device dist_backend dont_change_device dp_world_size dump_state dynamic_loss_scale
    dynamic_loss_scale_args eigenvalue eigenvalue_enabled eigenvalue_gas_boundary_resolution eigenvalue_layer_name
    eigenvalue_layer_num eigenvalue_max_iter eigenvalue_stability eigenvalue_tol eigenvalue_verbose
    elasticity_enabled empty_partition_cache enable_backward_allreduce engine_timers engine_timers_cache eval
    expert_data_parallel_group expert_parallel_group first_dataloader_check flatten flops flops_profiler
    flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file
    flops_profiler_profile_step flops_profiler_recompute_fwd_factor flops_profiler_top_modules forward
    fp16_auto_cast fp16_enabled fp16_master_weights_and_gradients fwd_duration gas_boundary_ctr gate_modules
    get_autosp_backend get_autotp_backend get_batch_info get_compile_time get_data_parallel_rank get_data_types
    get_deepcompile_backend get_deepspeed_compile_backend get_global_grad_norm get_lr get_model_parallel_rank
    get_mom get_pld_theta get_sequence_parallel_group get_tensor_parallel_rank get_type get_wall_clock_timers
    global_rank global_samples global_steps gradient_accumulation_steps gradient_average gradient_clipping
    gradient_predivide_factor graph_harvesting has_moe_layers initial_dynamic_scale inside_no_sync_ctxt is_compiled
    is_deepcompile_active is_deepcompile_enabled is_elastic_model_parallel_supported
    is_first_weights_partition_group is_gradient_accumulation_boundary is_iterable_style_dataset
    is_map_style_dataset is_sanity_checks_enabled load_checkpoint load_module_state_dict load_moe_state_dict
    load_universal_checkpoint loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size
    local_all_to_all_group local_rank log_level loss_scale losses lr_scheduler managed_gradient_accumulation
    memory_breakdown mesh_device micro_steps mics_shard_size module_forward_post_hook module_forward_pre_hook
    module_state_dict moe_layers monitor mp_world_size mpu no_sync num_experts offload_states
    optimized_linear_base_weight_sharding optimized_linear_lora_enabled optimizer optimizer_legacy_fusion
    optimizer_name optimizer_params param_names pipeline_parallelism pld_enabled pld_gamma pld_params pld_theta
    postscale_gradients print_forward_breakdown progressive_layer_drop quantize_training quantizer
    random_ltd_config random_ltd_enabled random_ltd_initialize random_ltd_scheduler register_compile_pass
    reload_states save_16bit_model save_checkpoint save_fp16_model save_non_zero_checkpoint save_zero_checkpoint
    scale scale_wrt_gas scheduler_name scheduler_params seq_data_parallel_group seq_dp_world_size
    seq_parallel_group sequence_parallel_size set_custom_curriculum_learning_schedule set_data_post_process_func
    set_gradient_accumulation_boundary set_train_batch_size set_train_micro_batch_size skipped_steps
    sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain sparse_gradients_enabled
    sparse_tensor_module_names step steps_per_print summary_events super_offload swap_tensor_config
    tensor_parallel_config timers torch_autocast_dtype torch_autocast_enabled
    torch_autocast_lower_precision_safe_modules torch_autocast_z0_gradscaler tput_timer train train_batch_size
    train_micro_batch_size_per_gpu training_data training_dataloader unflatten use_ds_comm use_node_local_storage
    uses_parallelization_pass_only wall_clock_breakdown warn_unscaled_loss was_step_applied world_size
    zenflow_config zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential
    zero_allow_untested_optimizer zero_compute_grad_norm zero_contiguous_gradients zero_cpu_offload
    zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_gather_16bit_weights_on_model_save zero_grad
    zero_grad_hooks zero_hpz_partition_size zero_ignore_unused_parameters zero_legacy_stage1
    zero_load_from_fp32_weights zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance
    zero_model_persistence_threshold zero_module_granularity_threshold zero_multi_rank_bucket_allreduce
    zero_nvme_offload_optimizer zero_offload_optimizer zero_offload_param zero_optimization
    zero_optimization_partition_gradients zero_optimization_partition_weights zero_optimization_stage
    zero_overlap_comm zero_param_persistence_threshold zero_parameter_alignment zero_partial_offload
    zero_prefetch_bucket_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
    zero_reduce_bucket_size zero_reduce_scatter zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory
    zero_sub_group_size zero_use_cpu_optimizer zeropp_loco_param
    """
)
PIPELINE_ENGINE = names_in(
    """
    eval_batch get_additional_losses get_pipeline_parallel_rank is_first_stage is_last_stage log_for_device
    reset_activation_shape set_batch_fn set_dataiterator set_dataloader set_has_attention_mask tput_log train_batch
    """
)
MODULE = names_in(
    """
    DeepSpeedConfig DeepSpeedConfigError DeepSpeedDataLoader DeepSpeedEngine DeepSpeedHybridEngine
    DeepSpeedInferenceConfig DeepSpeedOptimizer DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable
    DeepSpeedTransformerConfig DeepSpeedTransformerLayer DualPipeVEngine DualPipeVModule InferenceEngine OnDevice
    PipelineEngine PipelineModule add_config_arguments add_tuning_arguments checkpointing default_inference_config
    dist domino get_accelerator git_branch git_hash init_distributed init_inference initialize is_compile_supported
    load_ds_config log_dist logger merge_tp_model_init_into_config module_inject ops record_tp_model_init_args
    replace_transformer_layer resolve_per_head_muon_after_sharding revert_transformer_layer set_autotp_mode
    set_optimizer_flags tp_model_init version zero
    """
)

SIGNATURES = """
    runtime/engine.py ->
        DeepSpeedEngine.set_train_batch_size(train_batch_size)
        DeepSpeedEngine.set_data_post_process_func(post_process_func)
        DeepSpeedEngine.set_custom_curriculum_learning_schedule(schedule_func_dict)
        DeepSpeedEngine.deepspeed_io(dataset, batch_size, route, pin_memory, data_sampler, collate_fn,
            num_local_io_workers)
        DeepSpeedEngine.train(mode)
        DeepSpeedEngine.forward(*inputs, **kwargs)
        DeepSpeedEngine.backward(loss, retain_graph, scale_wrt_gas)
        DeepSpeedEngine.set_gradient_accumulation_boundary(is_boundary)
        DeepSpeedEngine.step(lr_kwargs)
        DeepSpeedEngine.module_state_dict(destination, prefix, keep_vars, exclude_frozen_parameters)
        DeepSpeedEngine.load_module_state_dict(checkpoint, strict, custom_load_fn, fetch_z3_params,
            z3_params_to_fetch, allowed_missing_keys)
        DeepSpeedEngine.load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states,
            load_lr_scheduler_states, load_module_only, custom_load_fn)
        DeepSpeedEngine.save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        DeepSpeedEngine.save_fp16_model(save_dir, save_filename)
        DeepSpeedEngine.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
    runtime/pipe/engine.py ->
        PipelineEngine.train_batch(data_iter)
        PipelineEngine.eval_batch(data_iter, return_logits, compute_loss, reduce_output, bcast_loss,
            num_micro_batches)
        PipelineEngine.set_train_batch_size(train_batch_size)
        PipelineEngine.set_dataloader(loader)
        PipelineEngine.set_dataiterator(iterator)
        PipelineEngine.load_module_state_dict(checkpoint, strict, custom_load_fn, fetch_z3_params,
            z3_params_to_fetch, allowed_missing_keys)
    __init__.py ->
        initialize(args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port,
            mpu, dist_init_required, collate_fn, config, mesh_param, config_params)
        add_config_arguments(parser)
        tp_model_init(model, tp_size, dtype, config, **kwargs)
        init_inference(model, config, **kwargs)
    runtime/pipe/module.py -> pipe
        LayerSpec.__init__(typename, *module_args, **module_kwargs)
        LayerSpec.build(log)
        TiedLayerSpec.__init__(key, typename, *module_args, forward_fn, tied_weight_attr, **module_kwargs)
        PipelineModule.__init__(layers, num_stages, topology, loss_fn, seed_layers, seed_fn, base_seed,
            partition_method, activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers,
            dynamic_shape)
    runtime/zero/partition_parameters.py -> zero
        Init.__init__(module, data_parallel_group, mem_efficient_linear, remote_device, pin_memory,
            config_dict_or_path, config, enabled, dtype, mpu, zero_param_parallel_group, zero_quantized_weights,
            zero_quantized_nontrainable_weights, sequence_data_parallel_group, param_swapper, tensor_overrides)
        GatheredParameters.__init__(params, modifier_rank, fwd_module, enabled)
    utils/tensor_fragment.py -> utils
        safe_get_full_fp32_param(param)
        safe_set_full_fp32_param(param, value)
        safe_get_full_optimizer_state(param, optim_state_key)
        safe_set_full_optimizer_state(param, value, optim_state_key)
        safe_get_full_grad(param)
        safe_set_full_grad(param, value)
        safe_get_local_grad(param)
        safe_get_local_fp32_param(param)
        safe_get_local_optimizer_state(param, optim_state_key)
        safe_set_local_grad(param, value)
        safe_set_local_fp32_param(param, value)
        safe_set_local_optimizer_state(param, value, optim_state_key)
        safe_update_full_grad_vectorized(param_list, update_func)
    utils/z3_leaf_module.py -> utils
        z3_leaf_module(model)
        get_z3_leaf_modules(model)
        set_z3_leaf_module(model, flag)
        set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
        unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
        set_z3_leaf_modules_by_name(model, module_names, flag, raise_if_not_found)
        set_z3_leaf_modules_by_suffix(model, module_name_suffixes, flag, raise_if_not_found)
    utils/logging.py -> utils
        log_dist(message, ranks, level)
    runtime/dataloader.py -> utils
        RepeatingLoader.__init__(loader)
    runtime/activation_checkpointing/checkpointing.py -> checkpointing
        non_reentrant_checkpoint(function, *args)
        checkpoint(function, *args, **kwargs)
        configure(mpu_, deepspeed_config, partition_activations, contiguous_checkpointing, num_checkpoints,
            checkpoint_in_cpu, synchronize, profile)
    ops/adam/fused_adam.py -> ops.adam
        FusedAdam.__init__(params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad,
            set_grad_none)
    ops/adam/cpu_adam.py -> ops.adam
        DeepSpeedCPUAdam.__init__(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad,
            adamw_mode, fp32_optimizer_states)
    ops/lamb/fused_lamb.py -> ops.lamb
        FusedLamb.__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay,
            max_grad_norm, max_coeff, min_coeff, amsgrad)
    ops/lion/fused_lion.py -> ops.lion
        FusedLion.__init__(params, lr, betas, weight_decay, set_grad_none)
    ops/lion/cpu_lion.py -> ops.lion
        DeepSpeedCPULion.__init__(model_params, lr, betas, weight_decay, fp32_optimizer_states)
    runtime/utils.py -> runtime.utils
        set_random_seed(seed)
        see_memory_usage(message, force)
    compression/compress.py -> compression.compress
        init_compression(model, deepspeed_config, teacher_model, mpu)
        redundancy_clean(model, deepspeed_config, mpu)
    moe/utils.py -> moe.utils
        split_params_into_different_moe_groups_for_optimizer(param_groups, max_group_size)
    """
"""Functions and methods that are here, too: DeepSpeed's file -> onebit.zero's module, and the arguments of each."""

ABSENT: dict[str, tuple[str, ...]] = {
    "DeepSpeedEngine.load_checkpoint": ("custom_load_fn",),
    "DeepSpeedEngine.load_module_state_dict": ("allowed_missing_keys",),
    "PipelineEngine.load_module_state_dict": ("allowed_missing_keys",),
    "Init.__init__": (
        "zero_param_parallel_group", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
        "sequence_data_parallel_group", "param_swapper", "tensor_overrides",
    ),
}  # fmt: skip
"""Last arguments that are not here."""


def signatures() -> Iterator[tuple[str, str, str, list[str]]]:
    """DeepSpeed's file, our module, a function's name and its arguments, as in the table."""
    source = module = ""
    for line in re.sub(r"\n {12}", " ", SIGNATURES).strip().splitlines():
        if "->" in line:
            source, _, module = (part.strip() for part in line.partition("->"))
        else:
            name, _, arguments = line.strip().removesuffix(")").partition("(")
            yield source, module, name, arguments.split(", ")


def arguments_in(source: str, name: str) -> list[str]:
    """The arguments of a function, or of "Class.method" without self, as the source text defines it."""
    found: ast.AST = ast.parse(source)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = next(node for node in found.body if isinstance(node, kinds) and node.name == part)  # type: ignore[attr-defined]
    assert isinstance(found, ast.FunctionDef)
    given = found.args
    plain = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    rest = [f"*{given.vararg.arg}"] if given.vararg else ["*"] * bool(given.kwonlyargs)
    named = [arg.arg for arg in given.kwonlyargs] + ([] if given.kwarg is None else [f"**{given.kwarg.arg}"])
    return [*(plain[1:] if "." in name else plain), *rest, *named]
