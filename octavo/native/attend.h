// The attention of a step, divided into tasks that threads take one by one.
#pragma once
#include <vector>

#include "work.h"

namespace octavo {

struct Tasks {
    std::vector<Task> first;
    std::vector<Task> last;       // tasks that merge parts: they start when all of the first are done
    std::vector<int64_t> places;  // arrays that tasks point to
    std::vector<int32_t> tokens;  // arrays that tasks point to
    int64_t partials = 0;
};

// Layers with the same heads, window and block table have the same tasks.
class StepTasks {
public:
    StepTasks(const Model &model, const Step &step);
    const Tasks &of(int64_t layer) const { return made_[kind_[layer]]; }
    int64_t partial_numbers() const { return partial_numbers_; }

private:
    std::vector<Tasks> made_;
    std::vector<size_t> kind_;  // of each layer
    int64_t partial_numbers_ = 1;
};

float *partials_for(const StepTasks &tasks);  // memory for partial results

void attend(const Model &model, const Layer &layer, const Step &step, const Tasks &tasks, const float *qkv, const Target &out, float *partials,
            Worker &me);

}  // namespace octavo
