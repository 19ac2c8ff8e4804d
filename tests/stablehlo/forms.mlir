// Forms of operations that JAX does not write, a module each, under its name. Results are compared with the module as it stands.

// LT total order
func.func @main(%x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> (tensor<4x6xi1>) {
  %r = stablehlo.compare LT, %x, %y, TOTALORDER : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// LE total order
func.func @main(%x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> (tensor<4x6xi1>) {
  %r = stablehlo.compare LE, %x, %y, TOTALORDER : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// GT total order
func.func @main(%x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> (tensor<4x6xi1>) {
  %r = stablehlo.compare GT, %x, %y, TOTALORDER : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// GE total order
func.func @main(%x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> (tensor<4x6xi1>) {
  %r = stablehlo.compare GE, %x, %y, TOTALORDER : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// EQ total order
func.func @main(%x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> (tensor<4x6xi1>) {
  %r = stablehlo.compare EQ, %x, %y, TOTALORDER : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// NE total order
func.func @main(%x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> (tensor<4x6xi1>) {
  %r = stablehlo.compare NE, %x, %y, TOTALORDER : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// add of booleans
func.func @main(%x: tensor<4x6xi1>, %y: tensor<4x6xi1>) -> (tensor<4x6xi1>) {
  %r = "stablehlo.add"(%x, %y) : (tensor<4x6xi1>, tensor<4x6xi1>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// multiply of booleans
func.func @main(%x: tensor<4x6xi1>, %y: tensor<4x6xi1>) -> (tensor<4x6xi1>) {
  %r = "stablehlo.multiply"(%x, %y) : (tensor<4x6xi1>, tensor<4x6xi1>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// away from zero
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4x6xf32>) {
  %r = "stablehlo.round_nearest_afz"(%x) : (tensor<4x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// is infinite
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4x6xi1>) {
  %r = "chlo.is_inf"(%x) : (tensor<4x6xf32>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// is minus infinite
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4x6xi1>) {
  %r = "chlo.is_neg_inf"(%x) : (tensor<4x6xf32>) -> tensor<4x6xi1>
  return %r : tensor<4x6xi1>
}

// constant like
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4x6xf32>) {
  %r = "chlo.constant_like"(%x) {value = 2.5 : f32} : (tensor<4x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// map
func.func @main(%x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> (tensor<4x6xf32>) {
  %r = "stablehlo.map"(%x, %y) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.add %a, %b : tensor<f32>
  %t = stablehlo.tanh %s : tensor<f32>
  stablehlo.return %t : tensor<f32> }) {dimensions = array<i64: 0, 1>} : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// batch norm
func.func @main(%x: tensor<4x6xf32>, %a: tensor<6xf32>, %b: tensor<6xf32>, %c: tensor<6xf32>, %d: tensor<6xf32>) -> (tensor<4x6xf32>) {
  %r = "stablehlo.batch_norm_inference"(%x, %a, %b, %c, %d) {epsilon = 1.5 : f32, feature_index = 1 : i64} : (tensor<4x6xf32>, tensor<6xf32>, tensor<6xf32>, tensor<6xf32>, tensor<6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// dot
func.func @main(%x: tensor<4x6xf32>, %y: tensor<6x3xf32>) -> (tensor<4x3xf32>) {
  %r = stablehlo.dot %x, %y, precision = [HIGHEST, HIGHEST] : (tensor<4x6xf32>, tensor<6x3xf32>) -> tensor<4x3xf32>
  return %r : tensor<4x3xf32>
}

// sum from two
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4xf32>) {
  %i = stablehlo.constant dense<2.0> : tensor<f32>
  %r = "stablehlo.reduce"(%x, %i) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.add %a, %b : tensor<f32>
  stablehlo.return %s : tensor<f32> }) {dimensions = array<i64: 1>} : (tensor<4x6xf32>, tensor<f32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// sum, the other way
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4xf32>) {
  %i = stablehlo.constant dense<0.0> : tensor<f32>
  %r = "stablehlo.reduce"(%x, %i) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.add %b, %a : tensor<f32>
  stablehlo.return %s : tensor<f32> }) {dimensions = array<i64: 1>} : (tensor<4x6xf32>, tensor<f32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// maximum from two
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4xf32>) {
  %i = stablehlo.constant dense<2.0> : tensor<f32>
  %r = "stablehlo.reduce"(%x, %i) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.maximum %a, %b : tensor<f32>
  stablehlo.return %s : tensor<f32> }) {dimensions = array<i64: 1>} : (tensor<4x6xf32>, tensor<f32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// sum of squares
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4xf32>) {
  %i = stablehlo.constant dense<0.0> : tensor<f32>
  %r = "stablehlo.reduce"(%x, %i) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %t = stablehlo.multiply %b, %b : tensor<f32>
  %s = stablehlo.add %a, %t : tensor<f32>
  stablehlo.return %s : tensor<f32> }) {dimensions = array<i64: 1>} : (tensor<4x6xf32>, tensor<f32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// replacing scatter
func.func @main(%x: tensor<4x6xf32>, %at: tensor<3x1xi32>, %u: tensor<3x6xf32>) -> (tensor<4x6xf32>) {
  %r = "stablehlo.scatter"(%x, %at, %u) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  stablehlo.return %b : tensor<f32> }) {
  scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
  index_vector_dim = 1>} : (tensor<4x6xf32>, tensor<3x1xi32>, tensor<3x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// scatter at a vector
func.func @main(%x: tensor<4x6xf32>, %at: tensor<3xi32>, %u: tensor<3x6xf32>) -> (tensor<4x6xf32>) {
  %r = "stablehlo.scatter"(%x, %at, %u) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.add %a, %b : tensor<f32>
  stablehlo.return %s : tensor<f32> }) {
  scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
  index_vector_dim = 1>} : (tensor<4x6xf32>, tensor<3xi32>, tensor<3x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// scatter, vectors first
func.func @main(%x: tensor<4x6xf32>, %at: tensor<1x3xi32>, %u: tensor<3x6xf32>) -> (tensor<4x6xf32>) {
  %r = "stablehlo.scatter"(%x, %at, %u) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.add %a, %b : tensor<f32>
  stablehlo.return %s : tensor<f32> }) {
  scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
  index_vector_dim = 0>} : (tensor<4x6xf32>, tensor<1x3xi32>, tensor<3x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// gather at a vector
func.func @main(%x: tensor<4x6xf32>, %at: tensor<3xi32>) -> (tensor<3x6xf32>) {
  %r = "stablehlo.gather"(%x, %at) {dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0],
  start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 6>} : (tensor<4x6xf32>, tensor<3xi32>) -> tensor<3x6xf32>
  return %r : tensor<3x6xf32>
}

// gather, vectors first
func.func @main(%x: tensor<4x6xf32>, %at: tensor<1x3xi32>) -> (tensor<3x6xf32>) {
  %r = "stablehlo.gather"(%x, %at) {dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0],
  start_index_map = [0], index_vector_dim = 0>, slice_sizes = array<i64: 1, 6>} : (tensor<4x6xf32>, tensor<1x3xi32>) -> tensor<3x6xf32>
  return %r : tensor<3x6xf32>
}

// gather of each row's, vectors first
func.func @main(%x: tensor<3x6xf32>, %at: tensor<1x3x3xi32>) -> (tensor<3x3xf32>) {
  %r = "stablehlo.gather"(%x, %at) {dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [1], operand_batching_dims = [0],
  start_indices_batching_dims = [1], start_index_map = [1], index_vector_dim = 0>, slice_sizes = array<i64: 1, 1>}
  : (tensor<3x6xf32>, tensor<1x3x3xi32>) -> tensor<3x3xf32>
  return %r : tensor<3x3xf32>
}

// scatter into each row's, vectors first
func.func @main(%x: tensor<3x6xf32>, %at: tensor<1x3x3xi32>, %u: tensor<3x3xf32>) -> (tensor<3x6xf32>) {
  %r = "stablehlo.scatter"(%x, %at, %u) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.add %a, %b : tensor<f32>
  stablehlo.return %s : tensor<f32> }) {
  scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [1], input_batching_dims = [0],
  scatter_indices_batching_dims = [1], scatter_dims_to_operand_dims = [1], index_vector_dim = 0>}
  : (tensor<3x6xf32>, tensor<1x3x3xi32>, tensor<3x3xf32>) -> tensor<3x6xf32>
  return %r : tensor<3x6xf32>
}

// convolution
func.func @main(%x: tensor<2x5x6x3xf32>, %k: tensor<3x2x3x4xf32>) -> (tensor<2x4x5x4xf32>) {
  %r = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {stride = [1, 2], pad = [[1, 0], [2, 2]], reverse = [false, false]} {feature_group_count = 1 : i64, batch_group_count = 1 : i64} : (tensor<2x5x6x3xf32>, tensor<3x2x3x4xf32>) -> tensor<2x4x5x4xf32>
  return %r : tensor<2x4x5x4xf32>
}

// turned convolution
func.func @main(%x: tensor<2x5x6x3xf32>, %k: tensor<3x2x3x4xf32>) -> (tensor<2x4x5x4xf32>) {
  %r = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {stride = [1, 2], pad = [[1, 0], [2, 2]], reverse = [true, false]} {feature_group_count = 1 : i64, batch_group_count = 1 : i64} : (tensor<2x5x6x3xf32>, tensor<3x2x3x4xf32>) -> tensor<2x4x5x4xf32>
  return %r : tensor<2x4x5x4xf32>
}

// if
func.func @main(%p: tensor<i1>, %x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> (tensor<4x6xf32>) {
  %r = "stablehlo.if"(%p) ({ stablehlo.return %x : tensor<4x6xf32> }, { stablehlo.return %y : tensor<4x6xf32> }) : (tensor<i1>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// case -12
func.func @main(%x: tensor<4x6xf32>, %k: tensor<i32>) -> (tensor<4x6xf32>) {
  %i = stablehlo.constant dense<-12> : tensor<i32>
  %j = stablehlo.add %i, %k : tensor<i32>
  %r = "stablehlo.case"(%j) (
  { %s = stablehlo.sine %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> },
  { %s = stablehlo.cosine %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> },
  { %s = stablehlo.abs %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> }) : (tensor<i32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// case -4
func.func @main(%x: tensor<4x6xf32>, %k: tensor<i32>) -> (tensor<4x6xf32>) {
  %i = stablehlo.constant dense<-4> : tensor<i32>
  %j = stablehlo.add %i, %k : tensor<i32>
  %r = "stablehlo.case"(%j) (
  { %s = stablehlo.sine %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> },
  { %s = stablehlo.cosine %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> },
  { %s = stablehlo.abs %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> }) : (tensor<i32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// case -3
func.func @main(%x: tensor<4x6xf32>, %k: tensor<i32>) -> (tensor<4x6xf32>) {
  %i = stablehlo.constant dense<-3> : tensor<i32>
  %j = stablehlo.add %i, %k : tensor<i32>
  %r = "stablehlo.case"(%j) (
  { %s = stablehlo.sine %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> },
  { %s = stablehlo.cosine %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> },
  { %s = stablehlo.abs %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> }) : (tensor<i32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// case 9
func.func @main(%x: tensor<4x6xf32>, %k: tensor<i32>) -> (tensor<4x6xf32>) {
  %i = stablehlo.constant dense<9> : tensor<i32>
  %j = stablehlo.add %i, %k : tensor<i32>
  %r = "stablehlo.case"(%j) (
  { %s = stablehlo.sine %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> },
  { %s = stablehlo.cosine %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> },
  { %s = stablehlo.abs %x : tensor<4x6xf32> stablehlo.return %s : tensor<4x6xf32> }) : (tensor<i32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// dynamic reshape
func.func @main(%x: tensor<4x6xf32>) -> (tensor<3x8xf32>) {
  %s = stablehlo.constant dense<[3, 8]> : tensor<2xi32>
  %r = stablehlo.dynamic_reshape %x, %s : (tensor<4x6xf32>, tensor<2xi32>) -> tensor<3x8xf32>
  return %r : tensor<3x8xf32>
}

// dynamic broadcast
func.func @main(%x: tensor<4x6xf32>) -> (tensor<2x4x6xf32>) {
  %s = stablehlo.constant dense<[2, 4, 6]> : tensor<3xi32>
  %r = stablehlo.dynamic_broadcast_in_dim %x, %s, dims = [1, 2] : (tensor<4x6xf32>, tensor<3xi32>) -> tensor<2x4x6xf32>
  return %r : tensor<2x4x6xf32>
}

// size
func.func @main(%x: tensor<4x6xf32>) -> (tensor<i32>) {
  %r = stablehlo.get_dimension_size %x, dim = 1 : (tensor<4x6xf32>) -> tensor<i32>
  return %r : tensor<i32>
}

// upper cholesky
func.func @main(%x: tensor<2x2xf32>) -> (tensor<2x2xf32>) {
  %z = stablehlo.constant dense<[[3.0, 1.0], [1.0, 2.0]]> : tensor<2x2xf32>
  %y = stablehlo.add %x, %z : tensor<2x2xf32>
  %t = stablehlo.transpose %y, dims = [1, 0] : (tensor<2x2xf32>) -> tensor<2x2xf32>
  %v = stablehlo.dot %t, %y : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>
  %r = stablehlo.cholesky %v, lower = false : tensor<2x2xf32>
  return %r : tensor<2x2xf32>
}

// window of sums, dilated
func.func @main(%x: tensor<4x6xf32>) -> (tensor<7x4xf32>) {
  %i = stablehlo.constant dense<1.0> : tensor<f32>
  %r = "stablehlo.reduce_window"(%x, %i) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.add %a, %b : tensor<f32>
  stablehlo.return %s : tensor<f32> }) {window_dimensions = array<i64: 2, 3>, base_dilations = array<i64: 2, 1>, window_dilations = array<i64: 1, 2>, padding = dense<[[0, 1], [2, 0]]> : tensor<2x2xi64>} : (tensor<4x6xf32>, tensor<f32>) -> tensor<7x4xf32>
  return %r : tensor<7x4xf32>
}

// loop that counts down
func.func @main(%x: tensor<4x6xf32>) -> (tensor<i32>, tensor<4x6xf32>) {
  %one = stablehlo.constant dense<1> : tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %n = stablehlo.constant dense<5> : tensor<i32>
  %r:2 = stablehlo.while(%i = %n, %c = %x) : tensor<i32>, tensor<4x6xf32> cond {
  %t = stablehlo.compare GT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.return %t : tensor<i1> } do {
  %j = stablehlo.subtract %i, %one : tensor<i32>
  %d = stablehlo.tanh %c : tensor<4x6xf32>
  stablehlo.return %j, %d : tensor<i32>, tensor<4x6xf32> }
  return %r#0, %r#1 : tensor<i32>, tensor<4x6xf32>
}

// loop in steps of three
func.func @main(%x: tensor<4x6xf32>) -> (tensor<i32>, tensor<4x6xf32>) {
  %three = stablehlo.constant dense<3> : tensor<i32>
  %zero = stablehlo.constant dense<1> : tensor<i32>
  %n = stablehlo.constant dense<9> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %c = %x) : tensor<i32>, tensor<4x6xf32> cond {
  %t = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.return %t : tensor<i1> } do {
  %j = stablehlo.add %i, %three : tensor<i32>
  %d = stablehlo.sine %c : tensor<4x6xf32>
  stablehlo.return %j, %d : tensor<i32>, tensor<4x6xf32> }
  return %r#0, %r#1 : tensor<i32>, tensor<4x6xf32>
}
