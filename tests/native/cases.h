// Cases as tests/support/case_file.py writes them: reading the file, and how far a result is from what is expected.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "../../octavo/native/scalar.h"

[[noreturn]] inline void give_up(const std::string &reason) {
    fprintf(stderr, "driver: %s\n", reason.c_str());
    exit(2);
}

template <class T> T read_as(const char *from, int64_t i) {
    T value;
    memcpy(&value, from + i * int64_t(sizeof value), sizeof value);
    return value;
}

struct Array {
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<char> bytes;

    size_t width() const { return size_t(dtype[1] - '0'); }
    int64_t count() const { return int64_t(bytes.size() / width()); }
    template <class T> T *as() { return reinterpret_cast<T *>(bytes.data()); }

    double number(const char *from, int64_t i) const {  // of memory that holds numbers of this type
        switch (dtype[0] * 10 + dtype[1]) {
            case 'f' * 10 + '4': return read_as<float>(from, i);
            case 'f' * 10 + '2': return f16_to_float(read_as<uint16_t>(from, i));
            case 'u' * 10 + '2': return bf16_to_float(read_as<uint16_t>(from, i));
            case 'u' * 10 + '1': return read_as<uint8_t>(from, i);
            case 'i' * 10 + '1': return read_as<int8_t>(from, i);
            case 'i' * 10 + '4': return read_as<int32_t>(from, i);
            default: return double(read_as<int64_t>(from, i));
        }
    }
};

struct Expected {
    std::string result, form, measure, levels;
    double tolerance;
    Array values;
};

struct Case {
    std::string kernel, title;
    std::map<std::string, double> numbers;
    std::map<std::string, Array> arrays;
    std::vector<Expected> expected;

    double real(const std::string &name, double otherwise = 0) const {
        auto found = numbers.find(name);
        return found == numbers.end() ? otherwise : found->second;
    }
    int32_t number(const std::string &name) const { return int32_t(real(name)); }
    Array *find(const std::string &name) {
        auto found = arrays.find(name);
        return found == arrays.end() ? nullptr : &found->second;
    }
    template <class T> T *get(const std::string &name) { return find(name) ? find(name)->as<T>() : nullptr; }
    Array &must(const std::string &name) {
        if (!find(name)) give_up(kernel + ", " + title + ": there is no array " + name);
        return *find(name);
    }
};

inline Array read_array(std::istream &line, std::istream &file) {
    Array array;
    std::string shape, size;
    if (!(line >> array.dtype >> shape)) give_up("an array has no type or shape");
    size_t bytes = array.width();
    for (std::stringstream sizes(shape); std::getline(sizes, size, 'x');) array.shape.push_back(std::stoll(size)), bytes *= size_t(array.shape.back());
    array.bytes.resize(bytes);
    file.read(array.bytes.data(), std::streamsize(bytes));
    if (file.get() != '\n') give_up("the file ends within an array, or an array is longer than its shape says");
    return array;
}

inline bool read_case(std::istream &file, Case &found) {
    found = {};
    for (std::string text, word, name; std::getline(file, text);) {
        std::stringstream line(text);
        line >> word;
        if (word == "end") return true;
        if (word == "case") {
            line >> found.kernel >> std::ws;
            std::getline(line, found.title);
        } else if (word == "number") {
            std::string value;  // True and False are numbers, too
            line >> name >> value;
            found.numbers[name] = value == "True" ? 1 : value == "False" ? 0 : std::stod(value);
        } else if (word == "array") {
            line >> name;
            found.arrays[name] = read_array(line, file);
        } else if (word == "expect") {
            Expected each;
            line >> each.result >> each.form >> each.measure >> each.tolerance >> each.levels;
            each.values = read_array(line, file);
            found.expected.push_back(std::move(each));
        } else {
            give_up("a line that is none: " + text);
        }
    }
    if (!found.kernel.empty()) give_up("the file ends within a case");
    return false;
}

// How far off a result is, in the measure that is asked for; infinity where something is finite that should not be, or the reverse.
inline double difference(const Expected &expected, const char *got, int64_t count) {
    const Array &values = expected.values;
    const char *wanted = values.bytes.data();
    if (!memcmp(wanted, got, size_t(count) * values.width())) return 0;
    bool exact = expected.measure == "exact", each = expected.measure == "each";
    double largest = 0, most = 0;
    for (int64_t i = 0; i < count; i++) {
        double good = values.number(wanted, i), found = values.number(got, i);
        if (std::isnan(good) && std::isfinite(found)) return INFINITY;
        if (std::isnan(good)) continue;
        if (std::isfinite(good)) largest = std::max(largest, std::abs(good));
        if (good == found) {
            bool same = !exact || !memcmp(wanted + i * int64_t(values.width()), got + i * int64_t(values.width()), values.width());
            if (!same) most = std::max(most, 1e-30);  // a zero of the other sign
            continue;
        }
        if (!std::isfinite(good) || !std::isfinite(found)) return INFINITY;
        most = std::max(most, each ? std::abs(found - good) / std::abs(good) : std::abs(found - good));
    }
    return exact || each || most == 0 ? most : most / largest;
}
