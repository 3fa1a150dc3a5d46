/* NSA forward and backward through triad_nsa.h, on the CPU: cc example.c $(pkg-config --cflags --libs triad_nsa) */
#include <stdio.h>
#include <stdlib.h>
#include <triad_nsa.h>

enum { T = 300, Hq = 4, Hkv = 2, D = 16, L = 8, STRIDE = 4 };

/* A contiguous f32 tensor [1,T,heads,width] of random values from -1 to 1. */
static triad_nsa_tensor make(int64_t heads, int64_t width) {
  triad_nsa_tensor t = {malloc(T * heads * width * sizeof(float)), TRIAD_NSA_F32, 4, {1, T, heads, width}, {0}};
  for (int i = 3; i >= 0; --i) t.stride[i] = i == 3 ? 1 : t.stride[i + 1] * t.size[i + 1];
  for (int64_t i = 0; i < T * heads * width; ++i) ((float*)t.data)[i] = 2.0f * rand() / RAND_MAX - 1.0f;
  return t;
}

static void check(triad_nsa_status status) {
  if (status == TRIAD_NSA_OK) return;
  fprintf(stderr, "%s: %s\n", triad_nsa_status_name(status), triad_nsa_last_error());
  exit(1);
}

int main(void) {
  triad_nsa_context* context;
  check(triad_nsa_context_create(&context, TRIAD_NSA_CPU)); /* or the ordinal of a GPU, with tensors on it */
  triad_nsa_options options;
  triad_nsa_default_options(&options);
  options.compress_length = L, options.compress_stride = STRIDE, options.block = 16, options.selected = 4;
  options.window = 64;

  /* The branches share k and v: only k[0] and v[0] are given. */
  triad_nsa_inputs in = {.struct_size = sizeof in, .q = make(Hq, D), .k[0] = make(Hkv, D), .v[0] = make(Hkv, D)};
  in.gate = make(Hq, 3); /* a gate per query head, in the order cmp, sel, win */
  triad_nsa_tensor out = make(Hq, D), dout = make(Hq, D);
  triad_nsa_saved_sizes size = {.struct_size = sizeof size};
  check(triad_nsa_saved_bytes(context, &options, &in, &size));
  triad_nsa_saved saved = {.struct_size = sizeof saved, .block_index = malloc(size.block_index)};
  for (int b = 0; b < 3; ++b) saved.o[b] = malloc(size.o), saved.lse[b] = malloc(size.lse);
  saved.k_cmp = malloc(size.k_cmp), saved.v_cmp = malloc(size.v_cmp);

  size_t bytes = 0; /* asked first, then used */
  check(triad_nsa_forward(context, NULL, &options, &in, &out, &saved, NULL, &bytes));
  check(triad_nsa_forward(context, NULL, &options, &in, &out, &saved, malloc(bytes), &bytes));

  triad_nsa_gradients grad = {.struct_size = sizeof grad, .q = make(Hq, D), .k[0] = make(Hkv, D), .gate = make(Hq, 3)};
  check(triad_nsa_backward(context, NULL, &options, &in, &saved, &dout, &grad, NULL, &bytes));
  check(triad_nsa_backward(context, NULL, &options, &in, &saved, &dout, &grad, malloc(bytes), &bytes));

  /* The first token sees itself alone: out = (gate_sel + gate_win) * v, since no compressed block has ended. */
  const float *gate = in.gate.data, *v = in.v[0].data, *o = out.data;
  const float expected = (gate[1] + gate[2]) * v[0], error = o[0] - expected;
  printf("library %s\nout[0] %.6f, expected %.6f; dq[last] %.6f\n", triad_nsa_build_info(), o[0], expected,
         ((float*)grad.q.data)[T * Hq * D - 1]);
  triad_nsa_context_destroy(context);
  return error > 1e-5f || error < -1e-5f;
}
