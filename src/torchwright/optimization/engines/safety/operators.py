"""The operators that a graph from a file may call: those that compute tensors from tensors and do nothing else.

Made once from the schemas of torch 2.13 and read through by eye. These are left out:

- what opens files (`from_file`);
- what changes the memory that a tensor lies in (`set_`, `resize_`, `as_strided_`, `_reshape_alias`);
- what trusts indices or sizes that it is given (`_unsafe_index`, pivots of `lu_solve`, samples of
  `fractional_max_pool2d`, nested and sparse tensors);
- what belongs to training (backward, optimizers), to one vendor's library, or to TorchScript (lists, dicts, strings).
"""

from __future__ import annotations

_ATEN = """
__and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
_adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async _assert_scalar _assert_tensor_metadata _conj_copy
_convert_weight_to_int4pack_for_cpu _convolution _convolution_mode _functional_assert_async
_functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size
_fused_rms_norm _int_mm _log_softmax _native_batch_norm_legit _native_batch_norm_legit_no_training
_native_multi_head_attention _pad_circular _prelu_kernel _safe_softmax _scaled_dot_product_attention_math
_scaled_dot_product_flash_attention_for_cpu _softmax _to_copy _to_cpu _transformer_encoder_layer_fwd _unique2
_unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d _weight_int4pack_mm_for_cpu _weight_norm
_weight_norm_interface abs abs_ absolute absolute_ acos acos_ acosh acosh_ adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add add_
addbmm addbmm_ addcdiv addcdiv_ addcmul addcmul_ addmm addmm_ addmv addmv_ addr addr_ adjoint
affine_grid_generator alias alias_copy all allclose alpha_dropout alpha_dropout_ amax amin aminmax angle any
arange arccos arccos_ arccosh arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan2 arctan2_ arctan_ arctanh
arctanh_ argmax argmin argsort argwhere as_strided as_strided_copy as_strided_scatter asin asin_ asinh asinh_
atan atan2 atan2_ atan_ atanh atanh_ atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm
baddbmm_ bartlett_window batch_norm bernoulli bernoulli_ bilinear binary_cross_entropy
binary_cross_entropy_with_logits bincount binomial bitwise_and bitwise_and_ bitwise_left_shift
bitwise_left_shift_ bitwise_not bitwise_not_ bitwise_or bitwise_or_ bitwise_right_shift bitwise_right_shift_
bitwise_xor bitwise_xor_ blackman_window block_diag bmm broadcast_tensors broadcast_to bucketize cartesian_prod
cat cauchy cauchy_ cdist ceil ceil_ celu celu_ chalf channel_shuffle cholesky cholesky_inverse cholesky_solve
chunk clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ clone col2im column_stack combinations
complex concat concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d conv3d conv_tbc
conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copy_ copysign copysign_ corrcoef cos cos_
cosh cosh_ cosine_embedding_loss cosine_similarity count_nonzero cov cpu cross cross_entropy_loss cummax cummin
cumprod cumprod_ cumsum cumsum_ cumulative_trapezoid deg2rad deg2rad_ dequantize det detach detach_ detach_copy
diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff digamma digamma_ dist div div_ divide
divide_ dot dropout dropout_ dsplit dstack einsum elu elu_ embedding embedding_bag empty empty_like
empty_permuted empty_strided eq eq_ equal erf erf_ erfc erfc_ erfinv erfinv_ exp exp2 exp2_ exp_ expand
expand_as expand_copy expm1 expm1_ exponential exponential_ eye fake_quantize_per_channel_affine
fake_quantize_per_tensor_affine feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_
fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn
fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq
fft_rfftn fill fill_ fill_diagonal_ fix fix_ flatten flip fliplr flipud float_power float_power_ floor floor_
floor_divide floor_divide_ fmax fmin fmod fmod_ frac frac_ frexp frobenius_norm full full_like gather gcd gcd_
ge ge_ gelu gelu_ geometric geometric_ ger glu gradient greater greater_ greater_equal greater_equal_
grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt gt_ hamming_window hann_window
hardshrink hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ heaviside heaviside_
hinge_embedding_loss histc hsplit hstack huber_loss hypot hypot_ i0 i0_ igamma igamma_ igammac igammac_ im2col
imag index index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_put index_put_ index_reduce
index_reduce_ index_select inner instance_norm inverse is_floating_point is_nonzero is_same_size isclose
isfinite isin isinf isnan isneginf isposinf isreal istft item kaiser_window kl_div kron kthvalue l1_loss
layer_norm lcm lcm_ ldexp ldexp_ le le_ leaky_relu leaky_relu_ lerp lerp_ less less_ less_equal less_equal_
lgamma lgamma_ lift_fresh lift_fresh_copy linalg__powsum linalg_cholesky linalg_cholesky_ex linalg_cond
linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv
linalg_inv_ex linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_matmul linalg_matrix_exp
linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv linalg_qr
linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv
linalg_tensorsolve linalg_vander linalg_vecdot linalg_vector_norm linear linspace log log10 log10_ log1p log1p_
log2 log2_ log_ log_normal log_normal_ log_sigmoid log_sigmoid_forward log_softmax logaddexp logaddexp2
logcumsumexp logdet logical_and logical_and_ logical_not logical_not_ logical_or logical_or_ logical_xor
logical_xor_ logit logit_ logspace logsumexp lstm lstm_cell lt lt_ mH mT margin_ranking_loss masked_fill
masked_fill_ masked_scatter masked_scatter_ masked_select matmul matrix_H matrix_exp matrix_power max max_pool1d
max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d
max_unpool3d maximum mean median meshgrid min minimum mish mish_ mm mode moveaxis movedim mse_loss msort mul
mul_ multi_margin_loss multinomial multiply multiply_ mv nan_to_num nan_to_num_ nanmean nanmedian nanquantile
nansum narrow narrow_copy native_batch_norm native_channel_shuffle native_dropout native_group_norm
native_layer_norm ne ne_ neg neg_ negative negative_ new_empty new_empty_strided new_full new_ones new_zeros
nextafter nextafter_ nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd nonzero nonzero_static
norm norm_except_dim normal normal_ not_equal not_equal_ nuclear_norm one_hot ones ones_like outer pad
pad_sequence pairwise_distance permute permute_copy pinverse pixel_shuffle pixel_unshuffle poisson
poisson_nll_loss polar polygamma polygamma_ positive pow pow_ prelu prod put put_ qr quantile rad2deg rad2deg_
rand rand_like randint randint_like randn randn_like random random_ randperm ravel real reciprocal reciprocal_
reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 relu6_ relu_ remainder remainder_ renorm renorm_
repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as resolve_conj
resolve_neg result_type rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round round_ row_stack
rrelu rrelu_ rsqrt rsqrt_ rsub scalar_tensor scaled_dot_product_attention scatter scatter_ scatter_add
scatter_add_ scatter_reduce scatter_reduce_ searchsorted select select_copy select_scatter selu selu_ sgn sgn_
sigmoid sigmoid_ sign sign_ signbit silu silu_ sin sin_ sinc sinc_ sinh sinh_ slice slice_copy slice_scatter
slogdet smooth_l1_loss soft_margin_loss softmax softplus softshrink sort special_airy_ai special_bessel_j0
special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_digamma
special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1
special_gammainc special_gammaincc special_gammaln special_hermite_polynomial_h special_hermite_polynomial_he
special_i0 special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
special_log1p special_log_ndtr special_log_softmax special_logit special_logsumexp special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln
special_ndtr special_ndtri special_polygamma special_psi special_round special_scaled_modified_bessel_k0
special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc special_softmax
special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta split split_copy split_with_sizes
split_with_sizes_copy sqrt sqrt_ square square_ squeeze squeeze_ squeeze_copy stack std std_mean stft sub sub_
subtract subtract_ sum svd swapaxes swapaxes_ swapdims swapdims_ sym_constrain_range
sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_stride t t_ t_copy take take_along_dim tan
tan_ tanh tanh_ tensor_split tensordot threshold threshold_ tile to topk trace transpose transpose_
transpose_copy trapezoid trapz tril tril_ tril_indices triplet_margin_loss triu triu_ triu_indices true_divide
true_divide_ trunc trunc_ type_as unbind unbind_copy unflatten unfold unfold_copy uniform uniform_
unique_consecutive unique_dim unique_dim_consecutive unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze
unsqueeze_ unsqueeze_copy upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d vander var var_mean vdot view view_as view_as_complex
view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack where xlogy xlogy_ zero zero_ zeros
zeros_like
"""
ATEN = frozenset(_ATEN.split())
"""Names of `torch.ops.aten`, each with all its overloads but those that write to `out`."""

_OWN = """
add_rms_norm attention conv_dense conv_depthwise gated grid_attention image_mean linear_bf16 linear_grouped
linear_w4a16 linear_w4a8 linear_w8a8 linear_w8a8_fused rms_norm
"""
OWN = frozenset(_OWN.split())
"""Names of `torch.ops.torchwright`. Those over the paged cache take page numbers on trust, and are in no graph."""

OWN_GPU = frozenset(["grid_attention"])
"""Names of `torch.ops.torchwright_gpu`."""

_QUANTIZED = """
choose_qparams choose_qparams_per_token choose_qparams_per_token_asymmetric choose_qparams_symmetric
convert_element_type dequantize_per_channel dequantize_per_channel_group dequantize_per_tensor dequantize_per_token
quantize_per_channel quantize_per_channel_group quantize_per_tensor quantize_per_token
"""
QUANTIZED = frozenset(_QUANTIZED.split())
"""Names of `torch.ops.quantized_decomposed`."""

TRANSFORMERS = frozenset(["grouped_mm_fallback"])
"""Names of `torch.ops.transformers`: layers of experts."""

PRIMS = frozenset(["inductor_force_stride_order"])
"""Names of `torch.ops.prims`: how a value lies, in the range of its own memory (`layout.py`)."""

_HIGHER_ORDER = "associative_scan cond map_impl scan while_loop wrap_with_autocast wrap_with_set_grad_enabled"
HIGHER_ORDER = frozenset(_HIGHER_ORDER.split())
"""Names of `torch.ops.higher_order`: they call graphs that lie in the same file."""

_PLAIN = "add and_ eq floordiv ge getitem gt le lshift lt mod mul ne neg or_ pos pow rshift sub truediv"
PLAIN = frozenset(f"_operator.{name}" for name in _PLAIN.split()) | {
    *("math.ceil", "math.floor", "math.trunc"),
    *("torch.sym_float", "torch.sym_int", "torch.sym_ite", "torch.sym_max", "torch.sym_min", "torch.sym_not"),
    "torch.sym_sqrt",
}
"""Arithmetic on sizes."""

NAMESPACES = {
    "torch.ops.aten": ATEN,
    "torch.ops.higher_order": HIGHER_ORDER,
    "torch.ops.prims": PRIMS,
    "torch.ops.quantized_decomposed": QUANTIZED,
    "torch.ops.torchwright": OWN,
    "torch.ops.torchwright_gpu": OWN_GPU,
    "torch.ops.transformers": TRANSFORMERS,
}


def is_allowed(target: str) -> bool:
    """Check whether a graph's file may call `target`, such as `torch.ops.aten.add.Tensor`."""
    if target in PLAIN:
        return True
    parts = target.split(".")
    names = NAMESPACES.get(".".join(parts[:3]), frozenset())
    if parts[2:3] == ["higher_order"]:
        return len(parts) == 4 and parts[3] in names
    if len(parts) != 5 or parts[3] not in names:
        return False
    return parts[4][:1].isalpha() and parts[4].rpartition("_")[2] != "out"
