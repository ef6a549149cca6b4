#include <stddef.h>
#if defined(__x86_64__)
#include <immintrin.h>
#ifdef __AVX512VNNI__
__m512i dot_512(__m512i sum, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sum, a, b); }
#endif
#ifdef __AVXVNNI__
__m256i dot_256(__m256i sum, __m256i a, __m256i b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#endif
#ifdef __AVX512BF16__
__m512 dot_bf16(__m512 sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
#endif
#ifdef __AMX_INT8__
void dot_tiles() { _tile_dpbssd(0, 1, 2); }
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
int8x16x4_t load_4(const signed char * from) { return vld1q_s8_x4(from); }
#ifdef __ARM_FEATURE_DOTPROD
int32x4_t dot_8(int32x4_t sum, int8x16_t a, int8x16_t b) { return vdotq_s32(sum, a, b); }
#endif
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
float16x8_t dot_16(float16x8_t sum, float16x8_t a, float16x8_t b) { return vfmaq_f16(sum, a, b); }
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
int32x4_t dot_matrix(int32x4_t sum, int8x16_t a, int8x16_t b) { return vmmlaq_s32(sum, a, b); }
#endif
#ifdef __ARM_FEATURE_SVE
#include <arm_sve.h>
svint32_t dot_scalable(svint32_t sum, svint8_t a, svint8_t b) { return svdot_s32(sum, a, b); }
#endif
#endif
float dot(const float * a, const float * b, size_t n) {
    float sum = 0;
    for (size_t at = 0; at < n; ++at) { sum += a[at] * b[at]; }
    return sum;
}
