// One AdamW step of an element, shared by the CPU and CUDA kernels: torch.optim.AdamW's formula in
// fp32, each operation rounded on its own.
#pragma once

#include <cmath>

#include "element.h"

namespace fsdpx {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  int64_t step = 1;         // of this update; the first is 1
  double grad_scale = 1.0;  // the gradient's factor: clipping, loss scaling
  bool maximize = false;
};

// What one step's elements have in common.
struct AdamWFactors {
  float grad_scale;
  float decay;        // 1 - lr * weight_decay
  float mean_step;    // 1 - beta1
  float square_keep;  // beta2
  float square_step;  // 1 - beta2
  float root_factor;  // sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
};

struct AdamWElement {
  float param;
  float exp_avg;
  float exp_avg_sq;
};

inline AdamWFactors factors_of(const AdamWOptions& options) {
  const double step = static_cast<double>(options.step);
  return {
      static_cast<float>(options.maximize ? -options.grad_scale : options.grad_scale),
      static_cast<float>(1.0 - options.lr * options.weight_decay),
      static_cast<float>(1.0 - options.beta1),
      static_cast<float>(options.beta2),
      static_cast<float>(1.0 - options.beta2),
      static_cast<float>(std::sqrt(1.0 - std::pow(options.beta2, step))),
      static_cast<float>(options.eps),
      static_cast<float>(options.lr / (1.0 - std::pow(options.beta1, step))),
  };
}

FSDPX_HD AdamWElement adamw_step(AdamWElement old, float grad, const AdamWFactors& by) {
  grad = multiply(grad, by.grad_scale);
  const float mean = add(old.exp_avg, multiply(add(grad, -old.exp_avg), by.mean_step));
  const float square =
      add(multiply(old.exp_avg_sq, by.square_keep), multiply(multiply(by.square_step, grad), grad));
  const float root = add(divide(square_root(square), by.root_factor), by.eps);
  const float update = multiply(by.step_size, divide(mean, root));
  return {element::quiet(add(multiply(old.param, by.decay), -update)), element::quiet(mean),
          element::quiet(square)};
}

}  // namespace fsdpx
