#include <cstdio>

#include <gtest/gtest.h>

#include "dosa/indexer.hpp"

namespace dosa {
namespace {

TEST(Api, VersionIsThreeNumbers) {
  int major = 0, minor = 0, patch = 0;
  EXPECT_EQ(std::sscanf(version(), "%d.%d.%d", &major, &minor, &patch), 3);
}

TEST(Api, DenseViewIsRowMajor) {
  float data[6] = {0, 1, 2, 3, 4, 5};
  const TensorView view = dense_view<const void>(data, DType::f32, {2, 3});
  EXPECT_EQ(*view.at<float>(1, 2), 5);
  EXPECT_EQ(*view.at<float>(1), 3);
}

}  // namespace
}  // namespace dosa
