// The attention of a step, cut into tasks that threads take one by one.
#pragma once
#include <vector>

#include "work.h"

namespace octavo {

struct Merge {  // parts of one context that have to become one
    int64_t token, queries, kv_head;
    int64_t first, parts;  // where they lie: in Tasks.places, and how many
};

struct Tasks {
    std::vector<Task> tasks;
    std::vector<Merge> merges;
    std::vector<int64_t> places;  // of parts, among the partial results
    std::vector<int32_t> tokens;  // that tasks point to
    int64_t partials = 0;
};

// Layers with as many heads, the same window and the same block table have the same tasks.
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

float *partials_for(const StepTasks &tasks);  // memory for the parts of contexts

void attend(const Model &model, const Layer &layer, const Step &step, const Tasks &tasks, const float *qkv, const Target &out, float *partials,
            Worker &me);

}  // namespace octavo
