// Passes over a feature map on a CPU, and Newton's iteration: twins of functions of `functional`:
//
//     cenet_measure   mean, variance and second moments of every image     `functional.moments`
//     cenet_map       y = P·(x − m) + d ⊙ (x − m) + c                       `functional.mix`
//     cenet_gram      Σ g·(x − m)ᵀ and Σ g, the gradients of P, d and c
//     cenet_gradient  the gradient of x, through the map and through the moments
//     cenet_newton    W of every group from its covariance           `functional.decorrelation`
//     cenet_newton_gradient    the gradients of covariance and scale
//     cenet_folded    a folded layer: measure, gate, map                     `nn.folded`
//     cenet_pool      the largest value of each window, or its gradient      `max_pool2d`
//
// Letters as in `functional`: N images of C channels, G groups of K channels, L pixels. The last
// group has the remainder of the channels. Everything is float32. A thread computes whole groups of
// an image, so results do not depend on the number of threads.
//
// A group is processed in tiles of pixels that fit the first-level cache. Two layouts:
//
//     Planes   contiguous: a channel of an image is L values in a row
//     Rows     channels_last: a pixel is C values in a row, and a group K <= 16 of them

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 4;  // floats in a register; registers in a row of a block
constexpr int ROWS = 16, TOGETHER = 8;  // channels_last: rows of a block; pixels mapped at once
#elif defined(__AVX__)
constexpr int LANES = 8, WIDE = 2;
constexpr int ROWS = 4, TOGETHER = 4;
#else
constexpr int LANES = 4, WIDE = 2;
constexpr int ROWS = 2, TOGETHER = 2;
#endif
constexpr int TALL = 4;    // rows of a block of a product
constexpr int TALLER = 2 * TALL;  // rows of a block that is one register wide
constexpr int CHAINS = 2;  // independent partial sums, so that an addition need not wait
constexpr int TILE = 256;  // pixels of a tile
constexpr int LINE = 2048;  // pixels of a tile if no products of two channels are taken
constexpr int AHEAD = 4096;  // distance of prefetching, in values
constexpr int ROW = 16;    // most channels of a group in channels_last
constexpr int PARTS = ROW / LANES;  // registers for ROW values
constexpr int LARGEST = 64;  // most channels of a group
constexpr int64_t SMALL = 1 << 14;  // up to so many values of a map, one thread is faster than more
constexpr int64_t FEW_GROUPS = 8;   // up to so many groups, likewise
constexpr int64_t CACHED = 1 << 20;  // so many values stay in the cache until they are mapped

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// each(0), …, each(N − 1), unrolled so that arrays with these indices stay in registers
template <int N, typename Each>
inline __attribute__((always_inline)) void unrolled(const Each& each) {
  if constexpr (N > 1) unrolled<N - 1>(each);
  each(std::integral_constant<int, N - 1>());
}

inline Vector load(const float* from) { return *reinterpret_cast<const Anywhere*>(from); }

inline void store(float* to, Vector v) { *reinterpret_cast<Anywhere*>(to) = v; }

// A block of a matrix product, in HEIGHT × WIDTH registers.
template <int HEIGHT, int WIDTH>
struct Block {
  Vector at[HEIGHT][WIDTH];

  // at[i][j] += left(i)·right[j]
  template <typename Left>
  inline __attribute__((always_inline)) void add(const Left& left, const Vector (&right)[WIDTH]) {
    unrolled<HEIGHT>([&](auto i) {
      const auto factor = left(i);
      unrolled<WIDTH>([&](auto j) { at[i][j] += factor * right[j]; });
    });
  }
};

// The channels of a group in one pixel.
struct Row {
  Vector part[PARTS] = {};

  Row& operator+=(const Row& other) {
    unrolled<PARTS>([&](auto i) { part[i] += other.part[i]; });
    return *this;
  }
};

inline Row load_row(const float* from) {
  Row row;
  unrolled<PARTS>([&](auto i) { row.part[i] = load(from + i * LANES); });
  return row;
}

inline void store_row(float* to, const Row& row) {
  unrolled<PARTS>([&](auto i) { store(to + i * LANES, row.part[i]); });
}

// the same for the first `size` channels only
inline Row load_row(const float* from, int size) {
  if (size == ROW) return load_row(from);
  float values[ROW] = {};
  std::memcpy(values, from, 4 * size);
  return load_row(values);
}

inline void store_row(float* to, const Row& row, int size) {
  if (size == ROW) return store_row(to, row);
  float values[ROW];
  store_row(values, row);
  std::memcpy(to, values, 4 * size);
}

inline Row operator-(Row a, const Row& b) {
  unrolled<PARTS>([&](auto i) { a.part[i] -= b.part[i]; });
  return a;
}

inline Row operator*(Row a, const Row& b) {
  unrolled<PARTS>([&](auto i) { a.part[i] *= b.part[i]; });
  return a;
}

inline Row operator*(float factor, Row a) {
  unrolled<PARTS>([&](auto i) { a.part[i] *= factor; });
  return a;
}

inline Row positive(Row a) {
  unrolled<PARTS>([&](auto i) { a.part[i] = a.part[i] < Vector{} ? Vector{} : a.part[i]; });
  return a;
}

inline float sum(Vector v) {
  float lanes[LANES];
  store(lanes, v);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// a0 + a1, a2 + a3, …, b0 + b1, b2 + b3, …
inline Vector add_neighbours(Vector a, Vector b) {
#if defined(__clang__)
  Vector even, odd;
  for (int lane = 0; lane < LANES; ++lane) {
    const int from = 2 * lane % LANES;
    even[lane] = lane < LANES / 2 ? a[from] : b[from];
    odd[lane] = lane < LANES / 2 ? a[from + 1] : b[from + 1];
  }
  return even + odd;
#else
  typedef int Places __attribute__((vector_size(4 * LANES)));
  Places even;
  for (int lane = 0; lane < LANES; ++lane) even[lane] = 2 * lane;
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
#endif
}

// Sums over lanes: lane i of the result is the sum of vector i. Smaller COUNTs are partial sums.
template <int COUNT = LANES>
inline Vector sum_each(const Vector* vectors) {
  if constexpr (COUNT == 1)
    return *vectors;
  else
    return add_neighbours(sum_each<COUNT / 2>(vectors), sum_each<COUNT / 2>(vectors + COUNT / 2));
}

struct Shape {
  int64_t images, channels, pixels, group;

  int64_t groups() const { return (channels + group - 1) / group; }
  int64_t tasks() const { return images * groups(); }
  int64_t size() const { return images * channels * pixels; }
};

// One group of one image.
struct Task {
  int64_t image, group, first;  // first: its first channel
  int size;                     // its channels

  Task(const Shape& shape, int64_t number)
      : image(number / shape.groups()),
        group(number % shape.groups()),
        first(group * shape.group),
        size(static_cast<int>(std::min(shape.group, shape.channels - first))) {}
};

// Copy the values of a group's channels out of (N, C) or (C,); zeros if `values` is null.
inline void load_values(const Task& task, const float* values, int64_t stride, float* to) {
  std::fill(to, to + LARGEST, 0.0f);
  if (values != nullptr) std::memcpy(to, values + task.image * stride + task.first, 4 * task.size);
}

// Mean and second moments of a group of an image, tile by tile, merged by Chan's formula. Each tile
// is centered by its own mean, so no digits are lost where means are large beside deviations.
struct Merged {
  double mean[LARGEST] = {};
  int64_t count = 0;
  std::vector<float> between;  // (K, K), second moments of the means of the tiles
  int size;

  explicit Merged(int size) : between(size * size), size(size) {}

  // center + rest is the mean of the values in the tile; its moments are taken around center.
  void add(const float* center, const float* rest, int64_t pixels, bool with_pairs) {
    float distance[LARGEST];
    const double whole = static_cast<double>(count + pixels);
    const float weight = static_cast<float>(count * (pixels / whole));
    for (int i = 0; i < size; ++i) {
      const double apart = static_cast<double>(center[i]) + rest[i] - mean[i];
      distance[i] = static_cast<float>(apart);
      mean[i] += apart * (pixels / whole);
    }
    count += pixels;
    for (int i = 0; i < size; ++i)
      for (int j = with_pairs ? 0 : i; j < (with_pairs ? size : i + 1); ++j)
        between[i * size + j] +=
            weight * distance[i] * distance[j] - static_cast<float>(pixels) * rest[i] * rest[j];
  }
};

// A tile of a group in contiguous layout: `size` rows of TILE values, with zeros behind the last
// pixel up to the end of its register.
typedef float Planes[LARGEST][TILE];

inline int padded(int size) { return (size + TALLER - 1) / TALLER * TALLER; }

inline int vectors(int pixels) { return (pixels + LANES - 1) / LANES; }

// `size` rounded up to whole registers
inline int whole(int size) { return vectors(size) * LANES; }

// Copy `pixels` values of a channel minus the center, fill the last register with zeros, and
// prefetch the same channel of the next tile. Returns the sum of the values, by lane.
inline Vector copy_plane(float* to, const float* from, float center, int pixels) {
  Vector total = {};
  int p = 0;
  for (; p + LANES <= pixels; p += LANES) {
    __builtin_prefetch(from + p + TILE);
    const Vector v = load(from + p) - center;
    total += v;
    store(to + p, v);
  }
  if (p < pixels) {
    for (int lane = 0; lane < LANES; ++lane) to[p + lane] = 0;
    for (; p < pixels; ++p) to[p] = from[p] - center;
    total += load(to + whole(pixels) - LANES);
  }
  return total;
}

inline void clear(Planes& tile, int size) {
  for (int i = size; i < padded(size); ++i) std::fill(tile[i], tile[i] + TILE, 0.0f);
}

// totals[i][j] += Σ_p a[i][p]·b[j][p], by lane. If the product is symmetric, only blocks with
// j >= i are computed.
inline void add_products(Vector* totals, const Planes& a, const Planes& b, int size, int steps,
                         bool symmetric) {
  const int rows = (size + TALL - 1) / TALL * TALL, row = whole(size);
  for (int i = 0; i < rows; i += TALL)
    for (int j = symmetric ? i : 0; j < rows; j += WIDE) {
      Block<TALL, WIDE> block = {};
      for (int step = 0; step < steps; ++step) {
        Vector right[WIDE];
        unrolled<WIDE>([&](auto w) { right[w] = load(b[j + w] + step * LANES); });
        block.add([&](auto t) { return load(a[i + t] + step * LANES); }, right);
      }
      unrolled<TALL>([&](auto t) {
        unrolled<WIDE>([&](auto w) { totals[(i + t) * row + j + w] += block.at[t][w]; });
      });
    }
}

// Sum the totals of `add_products` over lanes: (size, whole(size)).
inline void finish_products(const Vector* totals, int size, float* products) {
  for (int i = 0; i < size * whole(size); i += LANES) store(products + i, sum_each(totals + i));
}

struct Moments {
  float *mean, *rest, *var, *inside;  // (N, C) three times, (N, G, K, K) or null
};

// Write the moments. Rows of `products` have whole(size) values; only the upper triangle is read.
void finish_moments(const Shape& shape, const Task& task, const Merged& merged,
                    const float* products, const Moments& out) {
  const int row = whole(task.size);
  const int64_t here = task.image * shape.channels + task.first;
  const float share = 1.0f / shape.pixels;
  for (int i = 0; i < task.size; ++i) {
    const float mean = static_cast<float>(merged.mean[i]);
    out.mean[here + i] = mean;
    out.rest[here + i] = static_cast<float>(merged.mean[i] - mean);
    out.var[here + i] = (products[i * row + i] + merged.between[i * task.size + i]) * share;
  }
  if (out.inside == nullptr) return;
  const int64_t K = shape.group;
  float* inside = out.inside + (task.image * shape.groups() + task.group) * K * K;
  std::fill(inside, inside + K * K, 0.0f);
  for (int i = 0; i < task.size; ++i)
    for (int j = i; j < task.size; ++j)
      inside[i * K + j] = inside[j * K + i] =
          (products[i * row + j] + merged.between[i * task.size + j]) * share;
}

// The sum of `size` values minus `center`, and that of the squares.
inline void add_up(const float* from, float center, int size, float* total, float* squares) {
  Vector sums[WIDE] = {}, products[WIDE] = {};
  int p = 0;
  for (; p + WIDE * LANES <= size; p += WIDE * LANES)
    for (int w = 0; w < WIDE; ++w) {
      __builtin_prefetch(from + p + w * LANES + AHEAD);
      const Vector v = load(from + p + w * LANES) - center;
      sums[w] += v;
      products[w] += v * v;
    }
  for (int w = 1; w < WIDE; ++w) {
    sums[0] += sums[w];
    products[0] += products[w];
  }
  for (; p + LANES <= size; p += LANES) {
    const Vector v = load(from + p) - center;
    sums[0] += v;
    products[0] += v * v;
  }
  *total = sum(sums[0]);
  *squares = sum(products[0]);
  for (; p < size; ++p) {
    const float v = from[p] - center;
    *total += v;
    *squares += v * v;
  }
}

void measure_planes(const Shape& shape, const Task& task, const float* x, const Moments& out) {
  alignas(64) Planes tile;
  const bool pairs = out.inside != nullptr;
  const int size = task.size, row = whole(size);
  std::vector<Vector> totals(pairs ? padded(size) * row : 0);
  std::vector<float> products(size * row);
  Merged merged(size);
  x += (task.image * shape.channels + task.first) * shape.pixels;
  clear(tile, size);
  const int step = pairs ? TILE : LINE;
  for (int64_t begin = 0; begin < shape.pixels; begin += step) {
    const int pixels = static_cast<int>(std::min<int64_t>(step, shape.pixels - begin));
    float center[LARGEST], rest[LARGEST];
    for (int i = 0; i < size; ++i) {
      const float* from = x + i * shape.pixels + begin;
      float total, squares;
      add_up(from, 0.0f, pixels, &total, &squares);
      center[i] = total / pixels;
      if (pairs)
        total = sum(copy_plane(tile[i], from, center[i], pixels));
      else
        add_up(from, center[i], pixels, &total, &squares);
      rest[i] = total / pixels;
      if (!pairs) products[i * row + i] += squares;
    }
    if (pairs) add_products(totals.data(), tile, tile, size, vectors(pixels), true);
    merged.add(center, rest, pixels, pairs);
  }
  if (pairs) finish_products(totals.data(), size, products.data());
  finish_moments(shape, task, merged, products.data(), out);
}

// totals[i] += Σ_p a[p][i]·b[p]
inline void add_outer_products(Row* totals, const float (*a)[ROW], const float (*b)[ROW],
                               int pixels) {
  for (int first = 0; first < ROW; first += ROWS) {
    Block<ROWS, PARTS> block = {};
    for (int p = 0; p < pixels; ++p)
      block.add([&](auto i) { return a[p][first + i]; }, load_row(b[p]).part);
    unrolled<ROWS>([&](auto i) {
      unrolled<PARTS>([&](auto j) { totals[first + i].part[j] += block.at[i][j]; });
    });
  }
}

// The sum of the rows minus `center`, and that of the squares.
inline void add_up_rows(const float* from, int64_t apart, int size, const Row& center, int pixels,
                        Row* total, Row* squares) {
  Row sums[CHAINS], products[CHAINS];
  const auto add = [&](int p, auto chain) {
    const Row row = load_row(from + p * apart, size) - center;
    sums[chain] += row;
    products[chain] += row * row;
  };
  int p = 0;
  for (; p + CHAINS <= pixels; p += CHAINS)
    unrolled<CHAINS>([&](auto chain) { add(p + chain, chain); });
  for (; p < pixels; ++p) add(p, std::integral_constant<int, 0>());
  unrolled<CHAINS - 1>([&](auto chain) {
    sums[0] += sums[chain + 1];
    products[0] += products[chain + 1];
  });
  *total = sums[0];
  *squares = products[0];
}

void measure_rows(const Shape& shape, const Task& task, const float* x, const Moments& out) {
  alignas(64) float tile[TILE][ROW];
  const bool pairs = out.inside != nullptr;
  const int size = task.size;
  Row totals[ROW] = {};
  Merged merged(size);
  x += task.image * shape.channels * shape.pixels + task.first;
  for (int64_t begin = 0; begin < shape.pixels; begin += TILE) {
    const int pixels = static_cast<int>(std::min<int64_t>(TILE, shape.pixels - begin));
    const float* from = x + begin * shape.channels;
    Row total, squares;
    add_up_rows(from, shape.channels, size, Row(), pixels, &total, &squares);
    const Row center = (1.0f / pixels) * total;
    add_up_rows(from, shape.channels, size, center, pixels, &total, &squares);
    const Row rest = (1.0f / pixels) * total;
    if (pairs) {
      for (int p = 0; p < pixels; ++p)
        store_row(tile[p], load_row(from + p * shape.channels, size) - center);
      add_outer_products(totals, tile, tile, pixels);
    } else {
      totals[0] += squares;
    }
    float at[LARGEST] = {}, off[LARGEST] = {};
    store_row(at, center);
    store_row(off, rest);
    merged.add(at, off, pixels, pairs);
  }
  const int row = whole(size);
  float products[ROW * ROW] = {}, sums[ROW][ROW];
  for (int i = 0; i < ROW; ++i) store_row(sums[i], totals[i]);
  for (int i = 0; i < size; ++i)
    for (int j = i; j < (pairs ? size : i + 1); ++j)
      products[i * row + j] = sums[pairs ? i : 0][j];
  finish_moments(shape, task, merged, products, out);
}

// One term of a map: P·(x − m) + d ⊙ (x − m).
struct Term {
  const float *x, *less, *matrix, *diagonal;
  int64_t less_stride, diagonal_stride;  // from image to image
  bool transposed;

  // P + Diag(d) of a group of an image, (K, K), in rows of LARGEST values
  void load_operator(const Shape& shape, const Task& task, float (*to)[LARGEST]) const {
    const int64_t K = shape.group;
    const float* own = matrix == nullptr ? nullptr : matrix + task.group * K * K;
    for (int i = 0; i < padded(task.size); ++i)
      for (int j = 0; j < task.size; ++j)
        to[i][j] = i >= task.size || own == nullptr ? 0
                   : transposed                     ? own[j * K + i]
                                                    : own[i * K + j];
    if (diagonal == nullptr) return;
    const float* d = diagonal + task.image * diagonal_stride + task.first;
    for (int i = 0; i < task.size; ++i) to[i][i] += d[i];
  }
};

template <int TERMS>
struct Map {
  Term terms[TERMS];
  const float *constant, *residual;  // residual may be the result itself
  int64_t constant_stride;
  bool relu;
};

// Store the first `size` values of relu(value + residual) at y[at].
template <int TERMS>
inline void finish_map(const Map<TERMS>& map, Vector value, int64_t at, int size, float* y) {
  if (size < LANES) {
    float lanes[LANES];
    store(lanes, value);
    for (int lane = 0; lane < size; ++lane) {
      float v = lanes[lane];
      if (map.residual != nullptr) v += map.residual[at + lane];
      y[at + lane] = map.relu && v < 0 ? 0 : v;
    }
    return;
  }
  if (map.residual != nullptr) value += load(map.residual + at);
  if (map.relu) value = value < Vector{} ? Vector{} : value;
  store(y + at, value);
}

// A tile of every term of a map, with the matrices.
template <int TERMS>
struct MappedTile {
  alignas(64) Planes tiles[TERMS];
  float matrices[TERMS][LARGEST][LARGEST], constant[LARGEST];
  int size, pixels;

  // Compute registers v … v + WIDTH of rows i … i + HEIGHT, for y[at], y[at + stride], …
  template <int HEIGHT, int WIDTH>
  inline void map(const Map<TERMS>& map, int i, int v, int64_t at, int64_t stride, float* y) const {
    Block<HEIGHT, WIDTH> block;
    unrolled<HEIGHT>([&](auto t) {
      unrolled<WIDTH>([&](auto w) { block.at[t][w] = Vector{} + constant[i + t]; });
    });
    for (int k = 0; k < TERMS; ++k)
      for (int j = 0; j < size; ++j) {
        Vector right[WIDTH];
        unrolled<WIDTH>([&](auto w) { right[w] = load(tiles[k][j] + (v + w) * LANES); });
        block.add([&](auto t) { return matrices[k][i + t][j]; }, right);
      }
    if (i + HEIGHT <= size && (v + WIDTH) * LANES <= pixels) {
      unrolled<HEIGHT>([&](auto t) {
        unrolled<WIDTH>([&](auto w) {
          finish_map(map, block.at[t][w], at + t * stride + w * LANES, LANES, y);
        });
      });
      return;
    }
    float values[HEIGHT][WIDTH * LANES];
    unrolled<HEIGHT>([&](auto t) {
      unrolled<WIDTH>([&](auto w) { store(values[t] + w * LANES, block.at[t][w]); });
    });
    for (int t = 0; t < std::min(HEIGHT, size - i); ++t)
      for (int w = 0; w < WIDTH; ++w) {
        const int left = std::min(LANES, pixels - (v + w) * LANES);
        finish_map(map, load(values[t] + w * LANES), at + t * stride + w * LANES, left, y);
      }
  }
};

template <int TERMS>
void map_planes(const Shape& shape, const Task& task, const Map<TERMS>& map, float* y) {
  MappedTile<TERMS> tile;
  float less[TERMS][LARGEST];
  for (int k = 0; k < TERMS; ++k) {
    map.terms[k].load_operator(shape, task, tile.matrices[k]);
    load_values(task, map.terms[k].less, map.terms[k].less_stride, less[k]);
  }
  load_values(task, map.constant, map.constant_stride, tile.constant);
  tile.size = task.size;
  const int64_t start = (task.image * shape.channels + task.first) * shape.pixels;
  for (int64_t begin = 0; begin < shape.pixels; begin += TILE) {
    const int64_t here = start + begin;
    tile.pixels = static_cast<int>(std::min<int64_t>(TILE, shape.pixels - begin));
    for (int k = 0; k < TERMS; ++k)
      for (int j = 0; j < task.size; ++j) {
        const float* from = map.terms[k].x + here + j * shape.pixels;
        copy_plane(tile.tiles[k][j], from, less[k][j], tile.pixels);
      }
    for (int j = 0; map.residual != nullptr && j < task.size; ++j)
      for (int p = 0; p < tile.pixels; p += LANES)  // the next tile, as copy_plane for x
        __builtin_prefetch(map.residual + here + j * shape.pixels + p + TILE);
    const int registers = vectors(tile.pixels), blocks = registers / WIDE * WIDE;
    for (int i = 0; i < task.size; i += TALL)
      for (int v = 0; v < blocks; v += WIDE)
        tile.template map<TALL, WIDE>(map, i, v, here + i * shape.pixels + v * LANES,
                                      shape.pixels, y);
    for (int v = blocks; v < registers; ++v)
      for (int i = 0; i < task.size; i += TALLER)
        tile.template map<TALLER, 1>(map, i, v, here + i * shape.pixels + v * LANES,
                                     shape.pixels, y);
  }
}

template <int TERMS>
void map_rows(const Shape& shape, const Task& task, const Map<TERMS>& map, float* y) {
  float matrix[LARGEST][LARGEST], values[LARGEST];
  Row columns[TERMS][ROW], minus[TERMS];
  for (int k = 0; k < TERMS; ++k) {
    map.terms[k].load_operator(shape, task, matrix);
    for (int j = 0; j < ROW; ++j) {
      float column[ROW] = {};
      for (int i = 0; j < task.size && i < task.size; ++i) column[i] = matrix[i][j];
      columns[k][j] = load_row(column);
    }
    load_values(task, map.terms[k].less, map.terms[k].less_stride, values);
    minus[k] = load_row(values);
  }
  load_values(task, map.constant, map.constant_stride, values);
  const Row plus = load_row(values);
  const int64_t start = task.image * shape.channels * shape.pixels + task.first;
  alignas(64) float rows[TERMS][TOGETHER][ROW] = {};
  for (int64_t begin = 0; begin < shape.pixels; begin += TOGETHER) {
    const int pixels = static_cast<int>(std::min<int64_t>(TOGETHER, shape.pixels - begin));
    const int64_t here = start + begin * shape.channels;
    Block<TOGETHER, PARTS> block;
    unrolled<TOGETHER>([&](auto p) {
      unrolled<PARTS>([&](auto i) { block.at[p][i] = plus.part[i]; });
    });
    for (int k = 0; k < TERMS; ++k) {
      const float* from = map.terms[k].x + here;
      for (int p = 0; p < pixels; ++p)
        store_row(rows[k][p], load_row(from + p * shape.channels, task.size) - minus[k]);
      for (int j = 0; j < ROW; ++j)
        block.add([&](auto p) { return rows[k][p][j]; }, columns[k][j].part);
    }
    float mapped[TOGETHER][ROW];
    unrolled<TOGETHER>([&](auto p) {
      unrolled<PARTS>([&](auto i) { store(mapped[p] + i * LANES, block.at[p][i]); });
    });
    for (int p = 0; p < pixels; ++p) {
      const int64_t at = here + p * shape.channels;
      Row value = load_row(mapped[p]);
      if (map.residual != nullptr) value += load_row(map.residual + at, task.size);
      if (map.relu) value = positive(value);
      store_row(y + at, value, task.size);
    }
  }
}

struct Gram {
  float *products, *sums;  // (N, G, K, K), (N, C)
};

void gram_planes(const Shape& shape, const Task& task, const float* g, const float* x,
                 const float* less, int64_t less_stride, const Gram& out) {
  alignas(64) Planes left, right;
  const int size = task.size, row = whole(size);
  const int64_t K = shape.group;
  std::vector<Vector> totals(padded(size) * row);
  std::vector<float> added(size * row);
  Vector sums[LARGEST] = {};
  float minus[LARGEST];
  load_values(task, less, less_stride, minus);
  const int64_t start = (task.image * shape.channels + task.first) * shape.pixels;
  clear(left, size);
  clear(right, size);
  for (int64_t begin = 0; begin < shape.pixels; begin += TILE) {
    const int pixels = static_cast<int>(std::min<int64_t>(TILE, shape.pixels - begin));
    for (int i = 0; i < size; ++i) {
      const int64_t at = start + i * shape.pixels + begin;
      sums[i] += copy_plane(left[i], g + at, 0.0f, pixels);
      copy_plane(right[i], x + at, minus[i], pixels);
    }
    add_products(totals.data(), left, right, size, vectors(pixels), false);
  }
  float* products = out.products + (task.image * shape.groups() + task.group) * K * K;
  std::fill(products, products + K * K, 0.0f);
  finish_products(totals.data(), size, added.data());
  for (int i = 0; i < size; ++i) {
    out.sums[task.image * shape.channels + task.first + i] = sum(sums[i]);
    std::copy(added.data() + i * row, added.data() + i * row + size, products + i * K);
  }
}

void gram_rows(const Shape& shape, const Task& task, const float* g, const float* x,
               const float* less, int64_t less_stride, const Gram& out) {
  const int size = task.size;
  const int64_t K = shape.group;
  float values[LARGEST];
  load_values(task, less, less_stride, values);
  const Row minus = load_row(values);
  const int64_t start = task.image * shape.channels * shape.pixels + task.first;
  alignas(64) float left[TILE][ROW], right[TILE][ROW];
  Row totals[ROW] = {}, sums = {};
  for (int64_t begin = 0; begin < shape.pixels; begin += TILE) {
    const int pixels = static_cast<int>(std::min<int64_t>(TILE, shape.pixels - begin));
    Row total = {};
    for (int p = 0; p < pixels; ++p) {
      const int64_t at = start + (begin + p) * shape.channels;
      const Row row = load_row(g + at, size);
      total += row;
      store_row(left[p], row);
      store_row(right[p], load_row(x + at, size) - minus);
    }
    add_outer_products(totals, left, right, pixels);
    sums += total;
  }
  float* products = out.products + (task.image * shape.groups() + task.group) * K * K;
  std::fill(products, products + K * K, 0.0f);
  for (int i = 0; i < size; ++i) store_row(products + i * K, totals[i], size);
  store_row(out.sums + task.image * shape.channels + task.first, sums, size);
}

// Algebra of the K×K matrices of a group, in rows of `wide` values.
struct Square {
  int size, wide;

  explicit Square(int size) : size(size), wide(vectors(size) * LANES) {}

  int values() const { return size * wide; }

  // c = a·b, or c += a·b
  void multiply(const float* a, const float* b, float* c, bool add = false) const {
    product([&](int i, int k) { return a[i * wide + k]; }, b, c, add);
  }

  // c = aᵀ·b, or c += aᵀ·b
  void multiply_transposed(const float* a, const float* b, float* c, bool add = false) const {
    product([&](int i, int k) { return a[k * wide + i]; }, b, c, add);
  }

  void transpose(const float* a, float* to) const {
    for (int i = 0; i < size; ++i)
      for (int j = 0; j < size; ++j) to[j * wide + i] = a[i * wide + j];
  }

  float trace(const float* a) const {
    float total = 0;
    for (int i = 0; i < size; ++i) total += a[i * wide + i];
    return total;
  }

  void add_to_diagonal(float* a, float value) const {
    for (int i = 0; i < size; ++i) a[i * wide + i] += value;
  }

 private:
  template <typename Left>
  void product(const Left& left, const float* b, float* c, bool add) const {
    for (int i = 0; i < size; ++i)
      for (int v = 0; v < wide; v += LANES) {
        Vector total = add ? load(c + i * wide + v) : Vector{};
        for (int k = 0; k < size; ++k) total += left(i, k) * load(b + k * wide + v);
        store(c + i * wide + v, total);
      }
  }
};

// Eq. Newtoniter of one group in the coupled form of `functional.newton_inverse_sqrt`. Y, S and Z
// of every step are kept for the gradients:
//
//     Y_0 = −Σ / (2 tr Σ),  Y_t = Y_{t−1}·S_{t−1};  S_t = 1.5 I + Z_{t−1}·Y_t;  Z_t = S_t·Z_{t−1}
//
// where Z_{−1} = I: S_0 = Z_0 = 1.5 I + Y_0.
struct Newton {
  int steps;
  float ridge, floor;  // of Σ + (ridge · tr Σ / K + floor) · I
  Square square;
  std::vector<float> memory;  // (steps, 3, K, K), then Σ and six buffers of `backward`
  float trace = 0;

  Newton(int steps, int size, float ridge, float floor)
      : steps(steps), ridge(ridge), floor(floor), square(size),
        memory((3 * steps + 7) * square.values()) {}

  float* Y(int t) { return part(3 * t); }
  float* S(int t) { return part(3 * t + 1); }
  float* Z(int t) { return part(3 * t + 2); }
  float* sigma() { return part(3 * steps); }

  void forward(const float* cov, int64_t row, const float* scale) {
    const int size = square.size, wide = square.wide;
    for (int i = 0; i < size; ++i)
      for (int j = 0; j < size; ++j)
        sigma()[i * wide + j] = cov[i * row + j] * scale[i] * scale[j];
    square.add_to_diagonal(sigma(), ridge * square.trace(sigma()) / size + floor);
    trace = square.trace(sigma());
    for (int i = 0; i < square.values(); ++i) S(0)[i] = Y(0)[i] = sigma()[i] / (-2 * trace);
    square.add_to_diagonal(S(0), 1.5f);
    std::copy(S(0), S(0) + square.values(), Z(0));
    for (int t = 1; t < steps; ++t) {
      square.multiply(Y(t - 1), S(t - 1), Y(t));
      square.multiply(Z(t - 1), Y(t), S(t));
      square.add_to_diagonal(S(t), 1.5f);
      square.multiply(S(t), Z(t - 1), Z(t));
    }
  }

  // After `forward`: the gradients of cov and scale from that of W.
  void backward(const float* g, const float* cov, int64_t row, const float* scale, float* g_cov,
                float* g_scale) {
    const int size = square.size, wide = square.wide;
    float *gZ = part(3 * steps + 1), *gS = part(3 * steps + 2), *gY = part(3 * steps + 3);
    float *before = part(3 * steps + 4), *turned = part(3 * steps + 5);
    float* gS_before = part(3 * steps + 6);
    std::fill(gZ, gZ + 6 * square.values(), 0.0f);
    for (int i = 0; i < size; ++i) std::copy(g + i * row, g + i * row + size, gZ + i * wide);
    for (int t = steps - 1; t > 0; --t) {
      square.transpose(Z(t - 1), turned);
      square.multiply(gZ, turned, gS, true);
      square.multiply_transposed(S(t), gZ, before);
      square.transpose(Y(t), turned);
      square.multiply(gS, turned, before, true);
      square.multiply_transposed(Z(t - 1), gS, gY, true);
      square.multiply_transposed(Y(t - 1), gY, gS_before);
      std::swap(gZ, before);
      square.transpose(S(t - 1), turned);
      square.multiply(gY, turned, before);
      std::swap(gY, before);
      std::swap(gS, gS_before);
    }
    for (int i = 0; i < square.values(); ++i) gY[i] += gZ[i] + gS[i];
    // Y_0 = −Σ / (2 tr Σ), and Σ has a ridge
    float inner = 0;
    for (int i = 0; i < size; ++i)
      for (int j = 0; j < size; ++j) inner += gY[i * wide + j] * sigma()[i * wide + j];
    for (int i = 0; i < square.values(); ++i) gY[i] /= -2 * trace;
    square.add_to_diagonal(gY, inner / (2 * trace) / trace);
    square.add_to_diagonal(gY, ridge * square.trace(gY) / size);
    for (int i = 0; i < size; ++i) {
      float total = 0;
      for (int j = 0; j < size; ++j) {
        const float own = gY[i * wide + j];
        g_cov[i * row + j] = own * scale[i] * scale[j];
        total += (own * cov[i * row + j] + gY[j * wide + i] * cov[j * row + i]) * scale[j];
      }
      g_scale[i] = total;
    }
  }

 private:
  float* part(int number) { return memory.data() + number * square.values(); }
};

// each(task, newton) for every group
template <typename Each>
void for_each_group(const Shape& shape, int threads, int steps, float ridge, float floor,
                    const Each& each) {
#pragma omp parallel for num_threads(threads) if (shape.groups() > FEW_GROUPS)
  for (int64_t number = 0; number < shape.groups(); ++number) {
    const Task task(shape, number);
    Newton newton(steps, task.size, ridge, floor);
    each(task, newton);
  }
}

struct Windows {
  int64_t height, width, side;  // of an image, and of a window; those at the border may be partial

  int64_t down() const { return (height + side - 1) / side; }
  int64_t across() const { return (width + side - 1) / side; }
  int64_t count() const { return down() * across(); }
};

// Update the largest values of `count` neighbouring windows by one pixel of each; `most` holds them
// times the sign, so with sign −1 they are the smallest.
inline void take_larger(const float* x, int64_t apart, const float* sign, int64_t count,
                        float* most) {
  for (int64_t k = 0; k < count; ++k) {
    const float value = sign[k] * x[k * apart];
    most[k] = value > most[k] || value != value ? value : most[k];  // NaN stays
  }
}

// The gradient of one pixel of each window. The first pixel with the largest value gets all of the
// window's gradient; `rest` is that gradient until then, and 0 afterwards.
inline void give_gradient(const float* x, int64_t apart, const float* sign, int64_t count,
                          const float* most, float* rest, float* gradient) {
  for (int64_t k = 0; k < count; ++k) {
    const float value = sign[k] * x[k * apart];
    const bool is_it = value == most[k] || value != value;
    gradient[k * apart] = is_it ? rest[k] : 0;
    rest[k] = is_it ? 0 : rest[k];
  }
}

// Pool a group of an image into `pooled`; or, given the gradient g of `pooled`, write the gradient
// of x. Windows processed together are those of one row of a channel; in channels_last, those of
// all channels of the group at one place.
void pool(const Shape& shape, const Windows& windows, bool rows, const Task& task, const float* x,
          const float* signs, float* pooled, const float* g, float* gradient) {
  const int64_t across = windows.across(), count = rows ? task.size : across;
  const int64_t step = rows ? shape.channels : 1;  // from pixel to pixel
  const int64_t image = task.image * shape.channels;
  std::vector<float> sign(count), most(count), rest(count);
  const auto pool_beside = [&](int64_t channel, int64_t row, int64_t column) {
    const int64_t top = row * windows.side, left = column * windows.side;
    const int64_t begin = image * shape.pixels + channel * (rows ? 1 : shape.pixels);
    const int64_t to = image * windows.count() + channel * (rows ? 1 : windows.count()) +
                       (row * across + column) * step;
    for (int64_t k = 0; k < count; ++k) {
      sign[k] = signs[channel + (rows ? k : 0)];
      most[k] = g == nullptr ? -std::numeric_limits<float>::infinity() : sign[k] * pooled[to + k];
      if (g != nullptr) rest[k] = g[to + k];
    }
    for (int64_t i = top; i < std::min(top + windows.side, windows.height); ++i)
      for (int64_t j = left; j < std::min(left + windows.side, windows.width); ++j) {
        const int64_t at = begin + (i * windows.width + j) * step;
        const int64_t whole =
            rows ? count : (windows.width - j + windows.side - 1) / windows.side;
        const int64_t apart = rows ? 1 : windows.side;
        if (g == nullptr)
          take_larger(x + at, apart, sign.data(), whole, most.data());
        else
          give_gradient(x + at, apart, sign.data(), whole, most.data(), rest.data(), gradient + at);
      }
    for (int64_t k = 0; g == nullptr && k < count; ++k) pooled[to + k] = sign[k] * most[k];
  };
  for (int64_t channel = 0; channel < (rows ? 1 : task.size); ++channel)
    for (int64_t row = 0; row < windows.down(); ++row)
      for (int64_t column = 0; column < (rows ? across : 1); ++column)
        pool_beside(task.first + channel, row, column);
}

// The gate of instance reweighting in deployment, `functional.instance_gate`, for one image.
struct Gate {
  const float *w1, *norm_weight, *norm_bias, *w2;  // (H, C), (H,), (H,), (C, H)
  const float *inv_std, *share, *offset;           // (); d = share · gain + offset
  const float *shift, *constant;                   // (C,); c = constant + d ⊙ shift
  int64_t hidden;
  float norm_eps, largest;
};

inline float dot(const float* a, const float* b, int64_t size) {
  Vector sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES)
    for (int k = 0; k < 4; ++k)
      sums[k] += load(a + i + k * LANES) * load(b + i + k * LANES);
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < size; ++i) total += a[i] * b[i];
  return total;
}

// The gate's input: variance / s, scaled down where its square would overflow.
void gate_input(const Gate& gate, const float* var, int64_t channels, float* input) {
  const float most = std::numeric_limits<float>::max();
  const float inv = *gate.inv_std * *gate.inv_std;
  float largest = 0;
  for (int64_t i = 0; i < channels; ++i) {
    input[i] = var[i] * inv > most ? most : var[i] * inv;
    if (!(input[i] <= largest)) largest = input[i];  // NaN, too
  }
  const float factor = largest / gate.largest;
  if (factor > 1)
    for (int64_t i = 0; i < channels; ++i) input[i] /= factor;
}

// relu(LN(hidden)), in place
void gate_norm(const Gate& gate, float* hidden) {
  double mean = 0, square = 0;
  for (int64_t i = 0; i < gate.hidden; ++i) mean += hidden[i];
  mean /= gate.hidden;
  for (int64_t i = 0; i < gate.hidden; ++i) square += (hidden[i] - mean) * (hidden[i] - mean);
  const double rstd = 1 / std::sqrt(square / gate.hidden + gate.norm_eps);
  for (int64_t i = 0; i < gate.hidden; ++i) {
    const float normal = static_cast<float>((hidden[i] - mean) * rstd);
    const float value = normal * gate.norm_weight[i] + gate.norm_bias[i];
    hidden[i] = value < 0 ? 0 : value;
  }
}

template <typename Each>
void for_each_task(const Shape& shape, int threads, const Each& each) {
  const int64_t tasks = shape.tasks();
#pragma omp parallel for num_threads(threads) if (shape.size() > SMALL)
  for (int64_t number = 0; number < tasks; ++number) each(Task(shape, number));
}

}  // namespace

extern "C" {

// inside may be null
void cenet_measure(int64_t images, int64_t channels, int64_t pixels, int64_t group, int rows,
                   int threads, const float* x, float* mean, float* rest, float* var,
                   float* inside) {
  const Shape shape{images, channels, pixels, group};
  const Moments out{mean, rest, var, inside};
  const auto measure = rows ? measure_rows : measure_planes;
  for_each_task(shape, threads, [&](const Task& task) { measure(shape, task, x, out); });
}

// without g, `pooled` is written, else `gradient`
void cenet_pool(int64_t images, int64_t channels, int64_t pixels, int64_t group, int rows,
                int threads, int64_t height, int64_t width, int64_t side, const float* x,
                const float* signs, float* pooled, const float* g, float* gradient) {
  const Shape shape{images, channels, pixels, group};
  const Windows windows{height, width, side};
  for_each_task(shape, threads, [&](const Task& task) {
    pool(shape, windows, rows != 0, task, x, signs, pooled, g, gradient);
  });
}

// less, diagonal, constant and residual may be null; a stride of 0 is for values that all images
// share
void cenet_map(int64_t images, int64_t channels, int64_t pixels, int64_t group, int rows,
               int threads, const float* x, const float* less, int64_t less_stride,
               const float* matrix, int transposed, const float* diagonal, int64_t diagonal_stride,
               const float* constant, int64_t constant_stride, const float* residual, int relu,
               float* y) {
  const Shape shape{images, channels, pixels, group};
  const Term term{x, less, matrix, diagonal, less_stride, diagonal_stride, transposed != 0};
  const Map<1> map{{term}, constant, residual, constant_stride, relu != 0};
  const auto apply = rows ? map_rows<1> : map_planes<1>;
  for_each_task(shape, threads, [&](const Task& task) { apply(shape, task, map, y); });
}

// y = Pᵀ·g + d ⊙ g + Q·(x − m) + e ⊙ (x − m) + f; d and matrix Q may be null
void cenet_gradient(int64_t images, int64_t channels, int64_t pixels, int64_t group, int rows,
                    int threads, const float* g, const float* P, const float* d, int64_t d_stride,
                    const float* x, const float* less, int64_t less_stride, const float* Q,
                    const float* e, int64_t e_stride, const float* f, int64_t f_stride, float* y) {
  const Shape shape{images, channels, pixels, group};
  const Map<2> map{{{g, nullptr, P, d, 0, d_stride, true},
                    {x, less, Q, e, less_stride, e_stride, false}},
                   f, nullptr, f_stride, false};
  const auto apply = rows ? map_rows<2> : map_planes<2>;
  for_each_task(shape, threads, [&](const Task& task) { apply(shape, task, map, y); });
}

// cov and W: (G, K, K); in the padding of the last group W is the identity
void cenet_newton(int64_t channels, int64_t group, int threads, int steps, float ridge,
                  float floor, const float* cov, const float* scale, float* W) {
  const Shape shape{1, channels, 1, group};
  for_each_group(shape, threads, steps, ridge, floor, [&](const Task& task, Newton& newton) {
    const int64_t start = task.group * group * group;
    newton.forward(cov + start, group, scale + task.first);
    for (int i = 0; i < group; ++i)
      for (int j = 0; j < group; ++j)
        W[start + i * group + j] = i < task.size && j < task.size
                                       ? newton.Z(steps - 1)[i * newton.square.wide + j]
                                       : i == j;
  });
}

void cenet_newton_gradient(int64_t channels, int64_t group, int threads, int steps, float ridge,
                           float floor, const float* cov, const float* scale, const float* g,
                           float* g_cov, float* g_scale) {
  const Shape shape{1, channels, 1, group};
  for_each_group(shape, threads, steps, ridge, floor, [&](const Task& task, Newton& newton) {
    const int64_t start = task.group * group * group;
    std::fill(g_cov + start, g_cov + start + group * group, 0.0f);
    newton.forward(cov + start, group, scale + task.first);
    newton.backward(g + start, cov + start, group, scale + task.first, g_cov + start,
                    g_scale + task.first);
  });
}

// A few images at a time are measured, gated and mapped, so that they stay in the cache meanwhile.
void cenet_folded(int64_t images, int64_t channels, int64_t pixels, int64_t group, int rows,
                  int threads, const float* x, const float* matrix, const float* w1,
                  const float* norm_weight, const float* norm_bias, const float* w2,
                  int64_t hidden_size, float norm_eps, float largest, const float* inv_std,
                  const float* share, const float* offset, const float* shift,
                  const float* constant, const float* residual, int relu, float* y) {
  const Gate gate{w1,    norm_weight, norm_bias, w2,          inv_std,  share,
                  offset, shift,      constant,  hidden_size, norm_eps, largest};
  const Shape all{images, channels, pixels, group};
  const auto measure = rows ? measure_rows : measure_planes;
  const auto apply = rows ? map_rows<1> : map_planes<1>;
  const int64_t together = std::clamp<int64_t>(CACHED / (channels * pixels), 1, images);
  std::vector<float> values(together * (6 * channels + hidden_size));
  const auto part = [&](int64_t number) { return values.data() + number * together * channels; };
  float *mean = part(0), *rest = part(1), *var = part(2), *input = part(3);
  float *d = part(4), *c = part(5), *hidden = part(6);
  const Moments moments{mean, rest, var, nullptr};
#pragma omp parallel num_threads(threads) if (all.size() > SMALL)
  for (int64_t first = 0; first < images; first += together) {
    const int64_t count = std::min(together, images - first);
    const int64_t start = first * channels * pixels;
    const Shape some{count, channels, pixels, group};
    // a group of 16 channels is measured at a time, whatever the groups of the matrix
    const Shape measured{count, channels, pixels, rows ? ROW : group};
    const Term term{x + start, nullptr, matrix, d, 0, channels, false};
    const Map<1> map{
        {term}, c, residual == nullptr ? nullptr : residual + start, channels, relu != 0};
#pragma omp for
    for (int64_t task = 0; task < measured.tasks(); ++task)
      measure(measured, Task(measured, task), x + start, moments);
#pragma omp for
    for (int64_t n = 0; n < count; ++n)
      gate_input(gate, var + n * channels, channels, input + n * channels);
#pragma omp for
    for (int64_t i = 0; i < hidden_size; ++i)
      for (int64_t n = 0; n < count; ++n)
        hidden[n * hidden_size + i] = dot(w1 + i * channels, input + n * channels, channels);
#pragma omp for
    for (int64_t n = 0; n < count; ++n) gate_norm(gate, hidden + n * hidden_size);
#pragma omp for
    for (int64_t i = 0; i < channels; ++i)
      for (int64_t n = 0; n < count; ++n) {
        const float value = dot(w2 + i * hidden_size, hidden + n * hidden_size, hidden_size);
        const float factor = *share * *inv_std / (1 + std::exp(-value)) + *offset;
        d[n * channels + i] = factor;
        c[n * channels + i] = constant[i] + factor * shift[i];
      }
#pragma omp for
    for (int64_t task = 0; task < some.tasks(); ++task)
      apply(some, Task(some, task), map, y + start);
  }
}

void cenet_gram(int64_t images, int64_t channels, int64_t pixels, int64_t group, int rows,
                int threads, const float* g, const float* x, const float* less,
                int64_t less_stride, float* products, float* sums) {
  const Shape shape{images, channels, pixels, group};
  const Gram out{products, sums};
  const auto multiply = rows ? gram_rows : gram_planes;
  for_each_task(shape, threads, [&](const Task& task) {
    multiply(shape, task, g, x, less, less_stride, out);
  });
}
}
