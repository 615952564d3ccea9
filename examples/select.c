/* The same selection as select.cpp, through the C interface. */
#include <dosa/dosa.h>
#include <stdio.h>
#include <stdlib.h>

enum { KEYS = 1000, HEADS = 2, DIM = 32, TOPK = 4 };

static dosa_tensor dense(const void* data, dosa_dtype dtype, int rank, int64_t a, int64_t b, int64_t c) {
  const int64_t shape[3] = {a, b, c};
  dosa_tensor tensor = {0};
  int64_t stride = 1;
  int axis;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = rank;
  for (axis = rank - 1; axis >= 0; --axis) {
    tensor.shape[axis] = shape[axis];
    tensor.stride[axis] = stride;
    stride *= shape[axis];
  }
  return tensor;
}

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, dosa_last_error());
  return EXIT_FAILURE;
}

int main(void) {
  static uint8_t q[HEADS * DIM], k[KEYS * DIM];
  static float k_scale[KEYS];
  const float w[HEADS] = {1.0F, -0.5F};
  int32_t ids[TOPK];
  float scores[TOPK];
  int i;

  q[0] = q[DIM + 1] = 0x38; /* 1.0 in E4M3 */
  for (i = 0; i < KEYS; ++i) {
    k[i * DIM] = 0x38;
    k_scale[i] = (float)(i * 37 % KEYS);
  }

  dosa_problem problem = {0};
  problem.size = sizeof problem;
  problem.q = dense(q, DOSA_F8_E4M3, 3, 1, HEADS, DIM);
  problem.k = dense(k, DOSA_F8_E4M3, 2, KEYS, DIM, 0);
  problem.k_scale = dense(k_scale, DOSA_F32, 1, KEYS, 0, 0);
  problem.w = dense(w, DOSA_F32, 2, 1, HEADS, 0);
  problem.topk = TOPK;

  dosa_selection out = {0};
  out.size = sizeof out;
  out.ids = dense(ids, DOSA_I32, 2, 1, TOPK, 0);
  out.scores = dense(scores, DOSA_F32, 2, 1, TOPK, 0);

  dosa_indexer* indexer = NULL;
  if (dosa_indexer_create(NULL, &indexer) != DOSA_OK) return failed("create");

  const dosa_shape shape = {sizeof shape, 1, KEYS, HEADS, DIM, TOPK, 0, 1};
  dosa_plan* plan = NULL;
  if (dosa_plan_create(indexer, &shape, &plan) != DOSA_OK) return failed("plan");

  const size_t bytes = dosa_plan_workspace_bytes(plan);
  void* workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (workspace == NULL) return EXIT_FAILURE;
  if (dosa_run(indexer, plan, &problem, &out, workspace, bytes, NULL, NULL) != DOSA_OK) return failed("run");

  for (i = 0; i < TOPK; ++i) printf("%d %g\n", (int)ids[i], (double)scores[i]);

  free(workspace);
  dosa_plan_destroy(plan);
  dosa_indexer_destroy(indexer);
  return EXIT_SUCCESS;
}
